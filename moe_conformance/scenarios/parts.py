"""Split a workload into a part for all ranks and parts for single ranks, with the batches and arguments of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, overload

from moe_conformance.workloads.records.workload import Batch, Call, Drawn, Workload

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """The part of a workload, and of those interleaved with it, that is sent to one rank only."""

    tokens: tuple[tuple[int, ...], ...]  # T by microbatch and rank
    batches: tuple[Batch, ...]  # by microbatch
    given: tuple[Mapping[str, Any], ...]  # by call
    upstream: tuple[Mapping[str, Any] | None, ...]  # by call; None: no backward
    beside: tuple[Part, ...]


def part(workload: Workload, rank: int) -> Part:
    """Return the part of a workload that is sent to one rank only."""
    return Part(
        workload.tokens,
        tuple(ranks[rank] for ranks in workload.batches),
        tuple(call.given[rank] for call in workload.calls),
        tuple(call.upstream[rank] if call.upstream else None for call in workload.calls),
        tuple(part(other, rank) for other in workload.twist.beside),
    )


def common(workload: Workload) -> Workload:
    """Return the part of a workload that is sent to all ranks."""
    twist = replace(workload.twist, beside=tuple(map(common, workload.twist.beside)))
    calls = tuple(replace(call, given=(), upstream=()) for call in workload.calls)
    return replace(workload, batches=(), calls=calls, twist=twist)


def joined(workload: Workload, mine: Part, rank: int) -> Workload:
    """Return the workload of a rank from both parts; reading batches or arguments of other ranks raises IndexError."""
    beside = tuple(
        joined(other, argument, rank) for other, argument in zip(workload.twist.beside, mine.beside, strict=True)
    )
    calls = zip(workload.calls, mine.given, mine.upstream, strict=True)
    return replace(
        workload,
        batches=_Own(mine, rank),
        calls=tuple(_call(*argument, rank, workload.layout.world) for argument in calls),
        twist=replace(workload.twist, beside=beside),
    )


def _call(call: Call, given: Mapping[str, Any], upstream: Mapping[str, Any] | None, rank: int, world: int) -> Call:
    upstreams = () if upstream is None else _ByRank(rank, world, upstream)
    return replace(call, given=_ByRank(rank, world, given), upstream=upstreams)  # type: ignore[arg-type]


class _ByRank(Sequence[_T]):
    """A sequence by rank of which only the entry of one rank is present."""

    def __init__(self, rank: int, world: int, mine: _T) -> None:
        self._rank, self._world, self._own = rank, world, mine

    def __len__(self) -> int:
        return self._world

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | Sequence[_T]:
        if index != self._rank:
            raise IndexError(f"rank {self._rank} was sent nothing of {index}")
        return self._own


class _Own(Drawn):
    """Batches by microbatch and rank of which only those of one rank are present."""

    def __init__(self, mine: Part, rank: int) -> None:
        super().__init__(mine.tokens, lambda m, _: mine.batches[m])
        self._rank = rank

    @cached_property
    def _batches(self) -> Any:
        return tuple(
            _ByRank(self._rank, len(counts), self._draw(m, self._rank)) for m, counts in enumerate(self.tokens)
        )
