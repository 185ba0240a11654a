"""The backend's experts with a hook on every parameter, which records the gradients that autograd passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2_EDP2, Chapter
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

_RECIPES = (
    Recipe("own-hooked-even", schedule="F0 F1 B0 B1"),
    Recipe("own-hooked-even-bfloat16", schedule="F0 F1 B0 B1", config={"dtype": torch.bfloat16}),
)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for recipe in _RECIPES if layout.world <= USUAL_RANKS else ():
        yield replace(exchange_workload(recipe, ExpertsStep(), variant, layout), twist=Twist(hooked=True))


CHAPTERS = (Chapter((ExpertsStep(),), tuple(recipe.name for recipe in _RECIPES), draw, "every", (EP2_EDP2,)),)
