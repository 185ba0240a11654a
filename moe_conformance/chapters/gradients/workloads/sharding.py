"""The backend's experts with gradients, or parameters as well, sharded over the replicas of an expert.

Tokens are uneven, some ranks have none in a microbatch, and an expert may get none at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2_EDP2, SINGLE, Chapter
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

SHARDING = ExpertsStep(option="sharding")
_TOKENS, _SCHEDULE = (9, 5, 0, 4), "F0 F1 B0 B1"
_RECIPES = (
    Recipe("own-sharded-gradients", tokens=_TOKENS, config={"sharding": "gradients"}, schedule=_SCHEDULE),
    Recipe("own-sharded-parameters", tokens=_TOKENS, config={"sharding": "parameters"}, schedule=_SCHEDULE),
    Recipe(
        "own-sharded-parameters-bfloat16",
        tokens=_TOKENS,
        config={"sharding": "parameters", "dtype": torch.bfloat16},
        schedule=_SCHEDULE,
    ),
)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    del profile
    for recipe in _RECIPES if layout.world <= USUAL_RANKS else ():
        yield exchange_workload(recipe, SHARDING, variant, layout)


CHAPTERS = (Chapter((SHARDING,), tuple(recipe.name for recipe in _RECIPES), draw, "every", (SINGLE, EP2_EDP2)),)
