"""Exchanges with identity experts, in which the dtype of products and of sums in combine shows.

Tokens and weights use all bits of their dtypes. With one slot there is a product and no sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.half_precision import drawn_in, in_float16
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = ExchangeStep(answered="identity of parts", option="rounding")

_HALF = {"dtype": torch.bfloat16}
_BASE = (
    Recipe("one-product-even-bfloat16", config={**_HALF, "top_k": 1}),
    Recipe("sum-of-eight-even-bfloat16", config={**_HALF, "top_k": 8}),
)
_RECIPES = (*_BASE, *in_float16(_BASE))
NAMES = tuple(recipe.name for recipe in _RECIPES)


def draw_all(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout without expert shards, whose outputs would be parts of sums."""
    for recipe in drawn_in(profile, _RECIPES) if layout.etp == 1 else ():
        workload = exchange_workload(recipe, ExchangeStep(), variant, layout)
        batches = tuple(
            tuple(_batch(workload, m, rank, batch) for rank, batch in enumerate(ranks))
            for m, ranks in enumerate(workload.batches)
        )
        yield replace(workload, run=RUN, batches=batches)


def _batch(workload: Workload, m: int, rank: int, routed: Batch) -> Batch:
    generator = draw.generator(workload.name, workload.layout.name, "all bits", m, rank)
    return draw.real_batch(routed.ids_TK, workload.config, generator)


CHAPTERS = (Chapter((RUN,), NAMES, draw_all, "every", (SINGLE, EP2)),)
