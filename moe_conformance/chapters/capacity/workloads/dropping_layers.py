"""Whole layers whose router drops tokens, with shared experts and without; some tokens lose all their slots.

Tokens are drawn so that the selection of experts has a clear margin, and so has the drop by weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, Chapter
from moe_conformance.workloads.layers import DROPPING, layer_workload
from moe_conformance.workloads.records.runs import LayerStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile


def dropping(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    if layout.world > USUAL_RANKS:
        return
    for recipe in DROPPING:
        yield replace(layer_workload(recipe, variant, layout), run=LayerStep(drops=True))


CHAPTERS = (
    Chapter(
        (LayerStep(drops=True),),
        tuple(recipe.name for recipe in DROPPING),
        dropping,
        "every",
        (EP2, EP2_ETP2),
    ),
)
