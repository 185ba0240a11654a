"""Register the workloads of whole layers, with shared experts and without."""

from __future__ import annotations

from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.layers import LAYERS, PLAIN, REPEATED, others, plain, repeated
from moe_conformance.workloads.records.runs import LayerStep

CHAPTERS = (
    Chapter(
        (LayerStep(),),
        tuple(recipe.name for recipe in LAYERS if recipe.name not in PLAIN),
        others,
        "every",
        (SINGLE, EP2, EP2_ETP2, TP2_EP2),
    ),
    Chapter((LayerStep(),), PLAIN, plain, "every", (SINGLE, EP2, EP2_ETP2, EP2_EDP2, TP2_EP2)),
    Chapter((LayerStep(),), (REPEATED.name,), repeated, quick=(EP2,)),
)
