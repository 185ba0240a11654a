"""The backend's own experts: with a hook on every parameter, and over many microbatches.

A hook keeps what autograd passes to it. Of the microbatches the second half has gradients so small that each is lost if
it is added in bfloat16 to the sum of the first half: 1/64 of them, where half a step of that sum is more. All ranks
hold the same tokens, so that no two parts of a gradient cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, Chapter
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Drawn, Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

_RECIPES = (
    Recipe("own-hooked-even", schedule="F0 F1 B0 B1"),
    Recipe("own-hooked-even-bfloat16", schedule="F0 F1 B0 B1", config={"dtype": torch.bfloat16}),
)

LARGE, SMALL, RATIO = 8, 8, 2.0**-6  # microbatches of either kind, and of their gradients
ACCUMULATES = "accumulation"
_LONG = Recipe(
    "own-small-gradients-even-bfloat16",
    schedule=" ".join(f"F{m} B{m}" for m in range(LARGE + SMALL)),
    config={"dtype": torch.bfloat16},
)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for recipe in _RECIPES if layout.world <= USUAL_RANKS else ():
        yield replace(exchange_workload(recipe, ExpertsStep(), variant, layout), twist=Twist(hooked=True))


def long(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workload of many microbatches, of a variant on a layout."""
    if layout.world > USUAL_RANKS:
        return
    workload = exchange_workload(_LONG, ExpertsStep(), variant, layout)
    drawn = workload.batches

    def batch(microbatch: int, rank: int) -> Batch:
        first = drawn[0][0]
        return first if microbatch < LARGE else replace(first, upstream=first.upstream * RATIO)

    yield replace(workload, batches=Drawn(workload.tokens, batch), shows=frozenset({ACCUMULATES}))


CHAPTERS = (
    Chapter((ExpertsStep(),), tuple(recipe.name for recipe in _RECIPES), draw, "every", (EP2_EDP2,)),
    Chapter((ExpertsStep(),), (_LONG.name,), long, quick=(EP2, EP2_EDP2)),
)
