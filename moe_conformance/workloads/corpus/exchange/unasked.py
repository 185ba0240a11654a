"""Exchanges of which one input asks for no gradient: tokens behind frozen layers, or weights of a frozen router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.chapter import EP2, Chapter
from moe_conformance.workloads.corpus.recipes import ONE_WITHOUT, Recipe, exchange_workload
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Twist, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = ExchangeStep(unasked=True)

_RECIPES: tuple[tuple[Literal["x", "weights"], Recipe], ...] = (
    ("x", Recipe("unasked-x-even")),
    ("x", Recipe("unasked-x-rank-without-tokens", tokens=ONE_WITHOUT, profile="full")),
    ("weights", Recipe("unasked-weights-even")),
    ("weights", Recipe("unasked-weights-rank-without-tokens", tokens=ONE_WITHOUT, profile="full")),
)
NAMES = tuple(recipe.name for _, recipe in _RECIPES)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for name, recipe in _RECIPES:
        if profile == "full" or recipe.profile == "quick":
            workload = exchange_workload(recipe, RUN, variant, layout)
            yield replace(workload, twist=Twist(unasked=(name,)))


CHAPTERS = (Chapter((RUN,), NAMES, draw, "every", (EP2,)),)
