"""Whole layers whose router drops: tokens that lose all their slots, beside shared experts.

The first tokens stay, so that who loses what is clear from the choice alone, which the tokens are drawn to make clear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus import ONE_WITHOUT, USUAL_RANKS, Profile
from moe_conformance.workloads.layers import LayerRecipe, layer_workload
from moe_conformance.workloads.records import Workload


def _tight(factor: float, **others: Any) -> dict[str, Any]:
    return {"shared_ffn": (24,), "capacity_factor": factor, "drop_policy": "position", **others}


LAYERS = (
    LayerRecipe("dropping-half-even", _tight(0.5), tokens=(24,)),
    LayerRecipe("dropping-half-gate-even", _tight(0.5, shared_gate=True), tokens=(24,)),
    LayerRecipe("dropping-all-even", _tight(0.0)),
    LayerRecipe("dropping-all-rank-without-tokens", _tight(0.0), tokens=ONE_WITHOUT),
)


def dropping(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    if layout.world > USUAL_RANKS:
        return
    for recipe in LAYERS:
        yield replace(layer_workload(recipe, variant, layout), kind="dropping_layer")
