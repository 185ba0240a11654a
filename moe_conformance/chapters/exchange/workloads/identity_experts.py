"""Exchanges with identity experts: combine gets the tensor that dispatch returned, in the same memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, SINGLE, Chapter
from moe_conformance.workloads.recipes import UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records.half_precision import drawn_in, in_float16
from moe_conformance.workloads.records.routes import dropped, one_expert
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile

_BASE = (
    Recipe("identity-even"),
    Recipe("identity-uneven", tokens=UNEVEN),
    Recipe("identity-one-expert-even", one_expert, config={"top_k": 1}),
    Recipe("identity-dropped-even", dropped),
    Recipe("identity-in-flight-even", schedule="F0 N2 F1 B0 I3 B1"),
    Recipe("identity-even-bfloat16", config={"dtype": torch.bfloat16}),
)
_RECIPES = (*_BASE, *in_float16(_BASE))
NAMES = tuple(recipe.name for recipe in _RECIPES)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout without expert shards."""
    for recipe in drawn_in(profile, _RECIPES) if layout.etp == 1 else ():
        yield exchange_workload(recipe, ExchangeStep(answered="identity"), variant, layout)


CHAPTERS = (Chapter((ExchangeStep(answered="identity"),), NAMES, draw, "every", (SINGLE, EP2, EP2_EDP2)),)
