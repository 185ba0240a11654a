"""Scripts that pad pieces to equal splits and remove the padding, and exchanges with equal splits.

Padding rows hold NaN when padding is removed, and so does the upstream gradient of padding rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, Chapter
from moe_conformance.workloads.recipes import ONE_WITHOUT, Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.routes import one_rank
from moe_conformance.workloads.records.runs import ExchangeStep, Script
from moe_conformance.workloads.records.workload import Call, Ref, Workload
from moe_conformance.workloads.selection.profiles import Profile

_D = 3
_NAMES = {torch.float32: "equal-splits", torch.bfloat16: "equal-splits-bfloat16"}
_EQUAL = {"padding.splits": "equal"}
_EP4 = Layout(4, ep=4)

# The rows of the pieces for the ranks of ep, repeated as needed, and the size to which they are padded.
PIECES: Sequence[tuple[Sequence[int], int]] = (((2, 0, 3, 1), 3), ((1, 4), 6), ((0,), 2), ((0,), 0), ((4,), 4))
# The largest piece of rank r, repeated as needed, for calls of `size`: 0 on some ranks, on all, the same on all.
LARGEST: Sequence[Sequence[int]] = ((1, 5, 0, 2), (0,), (3,))

EXCHANGE = ExchangeStep(option="equal splits")
EXCHANGES = (
    Recipe("equal-splits-even", config=_EQUAL, schedule="F0 F1 B1 B0"),
    Recipe("equal-splits-rank-without-tokens", tokens=ONE_WITHOUT, config=_EQUAL),
    Recipe("equal-splits-one-rank-even", one_rank, config=_EQUAL, profile="full"),
    Recipe("equal-splits-no-tokens", turns=((0,), (3,)), config=_EQUAL, schedule="F0 B0 F1 B1", profile="full"),
)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of calls, in float32 and bfloat16."""
    del profile
    for dtype, name in _NAMES.items():
        if layout in (EP2, _EP4):
            config = Config(variant=variant, hidden=_D, dtype=dtype)
            yield Workload(name, Script("equal_splits"), config, layout, (), calls=tuple(_calls(name, layout, dtype)))


def exchanges(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the exchanges, on layouts with ep > 1."""
    for recipe in EXCHANGES:
        if layout.ep > 1 and (profile == "full" or recipe.profile == "quick"):
            yield exchange_workload(recipe, EXCHANGE, variant, layout)


def _calls(name: str, layout: Layout, dtype: torch.dtype) -> Iterator[Call]:
    for largest in LARGEST:
        yield Call("size", tuple({"pieces": _falling(largest[r % len(largest)], layout)} for r in range(layout.world)))
    for n, (pieces, size) in enumerate(PIECES):
        drawn = [
            _Drawn(f"{name} {pieces} {rank}", _turned(pieces, rank, layout), size, dtype)
            for rank in range(layout.world)
        ]
        sized = [{"pieces": rows.pieces, "size": size} for rows in drawn]
        yield Call("pad", tuple({"rows_RD": rows.rows_RD, **args} for rows, args in zip(drawn, sized, strict=True)),
                   ("rows_RD",), tuple({"": rows.upstream_PD} for rows in drawn))  # fmt: skip
        there = Ref(len(LARGEST) + 3 * n)
        yield Call("compact", tuple({"rows_PD": there, **args} for args in sized))
        yield Call("compact", tuple({"rows_PD": rows.rows_PD, **args} for rows, args in zip(drawn, sized, strict=True)),
                   ("rows_PD",), tuple({"": rows.upstream_RD} for rows in drawn))  # fmt: skip


def _falling(largest: int, layout: Layout) -> tuple[int, ...]:
    """Return the pieces for all ranks of ep, ascending to the largest."""
    return tuple(max(0, largest - n) for n in reversed(range(layout.ep)))


def _turned(pieces: Sequence[int], rank: int, layout: Layout) -> tuple[int, ...]:
    return tuple(pieces[(rank + n) % len(pieces)] for n in range(layout.ep))


class _Drawn:
    """The drawn rows of one rank and their upstream gradients."""

    def __init__(self, seed: str, pieces: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
        g = draw.generator(seed)
        self.pieces = pieces

        def rows(number: int) -> Tensor:
            return torch.randn(number, _D, generator=g).to(dtype)

        empty = [torch.arange(size) >= n for n in pieces]
        padding_P = torch.cat(empty)
        self.rows_RD, self.upstream_RD = rows(sum(pieces)), rows(sum(pieces))
        self.rows_PD, self.upstream_PD = (
            rows(size * len(pieces)).masked_fill(padding_P[:, None], torch.nan) for _ in range(2)
        )


CHAPTERS = (
    Chapter((Script("equal_splits"),), tuple(_NAMES.values()), scripts, quick=(EP2,)),
    Chapter((EXCHANGE,), tuple(recipe.name for recipe in EXCHANGES), exchanges, "every", (EP2, EP2_ETP2)),
)
