"""Exchanges in which one input requires no gradient: tokens after frozen layers, or weights of a frozen router.

The experts of a backend still learn from such tokens, also with equally many rows each, where backends take shortcuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, Chapter
from moe_conformance.workloads.recipes import ONE_WITHOUT, Recipe, exchange_workload
from moe_conformance.workloads.records.routes import in_turn
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Twist, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = ExchangeStep(unasked=True)
OWN = ExpertsStep(unasked=True)

_RECIPES: tuple[tuple[Literal["x", "weights"], Recipe], ...] = (
    ("x", Recipe("unasked-x-even")),
    ("x", Recipe("unasked-x-rank-without-tokens", tokens=ONE_WITHOUT, profile="full")),
    ("weights", Recipe("unasked-weights-even")),
    ("weights", Recipe("unasked-weights-rank-without-tokens", tokens=ONE_WITHOUT, profile="full")),
)
NAMES = tuple(recipe.name for _, recipe in _RECIPES)
_OWN = Recipe("own-unasked-x-equal", in_turn, config={"experts": 8, "dtype": torch.bfloat16})


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for name, recipe in _RECIPES:
        if profile == "full" or recipe.profile == "quick":
            workload = exchange_workload(recipe, RUN, variant, layout)
            yield replace(workload, twist=Twist(unasked=(name,)))


def own(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workload with the backend's experts, for a variant on a layout."""
    if 8 % layout.ep == 0:
        yield replace(exchange_workload(_OWN, OWN, variant, layout), twist=Twist(unasked=("x",)))


CHAPTERS = (
    Chapter((RUN,), NAMES, draw, "every", (EP2,)),
    Chapter((OWN,), (_OWN.name,), own, "every", (EP2,)),
)
