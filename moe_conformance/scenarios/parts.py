"""What of a workload is sent to all ranks, and what to one alone: it needs no batches and arguments but its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, overload

from moe_conformance.workloads.records.workload import Batch, Call, Drawn, Workload

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """What one rank alone is sent of a workload, and of those that it takes turns with."""

    tokens: tuple[tuple[int, ...], ...]  # T by microbatch and rank
    batches: tuple[Batch, ...]  # by microbatch
    given: tuple[Mapping[str, Any], ...]  # by call
    upstream: tuple[Mapping[str, Any] | None, ...]  # by call; None: nothing goes backward
    beside: tuple[Part, ...]


def part(workload: Workload, rank: int) -> Part:
    """Return what is sent to a rank alone."""
    return Part(
        workload.tokens,
        tuple(ranks[rank] for ranks in workload.batches),
        tuple(call.given[rank] for call in workload.calls),
        tuple(call.upstream[rank] if call.upstream else None for call in workload.calls),
        tuple(part(other, rank) for other in workload.twist.beside),
    )


def common(workload: Workload) -> Workload:
    """Return what is sent to all ranks."""
    twist = replace(workload.twist, beside=tuple(map(common, workload.twist.beside)))
    calls = tuple(replace(call, given=(), upstream=()) for call in workload.calls)
    return replace(workload, batches=(), calls=calls, twist=twist)


def joined(workload: Workload, own: Part, rank: int) -> Workload:
    """Return a workload as a rank has it: where others' batches and arguments would be, there is nothing to get."""
    beside = tuple(joined(other, each, rank) for other, each in zip(workload.twist.beside, own.beside, strict=True))
    calls = zip(workload.calls, own.given, own.upstream, strict=True)
    return replace(
        workload,
        batches=_Own(own, rank),
        calls=tuple(_call(*each, rank, workload.layout.world) for each in calls),
        twist=replace(workload.twist, beside=beside),
    )


def _call(call: Call, given: Mapping[str, Any], upstream: Mapping[str, Any] | None, rank: int, world: int) -> Call:
    upstreams = () if upstream is None else _ByRank(rank, world, upstream)
    return replace(call, given=_ByRank(rank, world, given), upstream=upstreams)  # type: ignore[arg-type]


class _ByRank(Sequence[_T]):
    """Something of every rank, of which only one rank's is here."""

    def __init__(self, rank: int, world: int, own: _T) -> None:
        self._rank, self._world, self._own = rank, world, own

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
    """Batches by microbatch and rank, of which only one rank's are here."""

    def __init__(self, own: Part, rank: int) -> None:
        super().__init__(own.tokens, lambda m, _: own.batches[m])
        self._rank = rank

    @cached_property
    def _batches(self) -> Any:
        return tuple(_ByRank(self._rank, len(each), self._draw(m, self._rank)) for m, each in enumerate(self.tokens))
