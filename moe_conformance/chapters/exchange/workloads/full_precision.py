"""Exchanges with identity experts of numbers that use all bits of their dtype, so that any rounding shows.

Every token has one expert. In every product one factor is 1, and in every sum all terms but one are zero, so that
outputs have the bits of inputs: first tokens have all bits, then upstream gradients, then weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.recipes import UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.half_precision import drawn_in, in_float16
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = ExchangeStep(answered="identity of parts")
IN_TURN = 3  # microbatch m has all bits in tokens (m = 0, 3, ..), in upstream gradients (1, ..) or in weights (2, ..)

_TRAINED = "F0 B0 F1 B1 F2 B2"
_BASE = (
    Recipe("every-bit-even", schedule=_TRAINED, config={"top_k": 1}),
    Recipe("every-bit-uneven", tokens=UNEVEN, schedule=_TRAINED, config={"top_k": 1}),
    Recipe("every-bit-even-bfloat16", schedule=_TRAINED, config={"top_k": 1, "dtype": torch.bfloat16}),
    Recipe("every-bit-even-float64", schedule=_TRAINED, config={"top_k": 1, "dtype": torch.float64}),
    Recipe("every-bit-input-weights-even", schedule=_TRAINED, config={"top_k": 1, "weights_applied": "input"}),
    Recipe("every-bit-inference-even", schedule="N0 F1 B1 I2 I3", config={"top_k": 1}),
)
_RECIPES = (*_BASE, *in_float16(_BASE))
NAMES = tuple(recipe.name for recipe in _RECIPES)


def draw_all(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for recipe in drawn_in(profile, _RECIPES):
        workload = exchange_workload(recipe, ExchangeStep(), variant, layout)
        batches = tuple(
            tuple(_batch(recipe.name, layout, m, rank, batch, workload) for rank, batch in enumerate(ranks))
            for m, ranks in enumerate(workload.batches)
        )
        yield replace(workload, run=RUN, batches=batches)


def _batch(name: str, layout: Layout, m: int, rank: int, routed: Batch, workload: Workload) -> Batch:
    """Return a batch in which one of tokens, upstream gradients and weights has all bits.

    The other rows have a single 1, the other weights are 1.
    """
    generator = draw.generator(name, layout.name, "every bit", m, rank)
    full = draw.real_batch(routed.ids_TK, workload.config, generator)
    T, D = full.x_TD.shape
    column_T = torch.randint(0, D, (T,), generator=generator)
    one_TD = F.one_hot(column_T, D).to(full.x_TD.dtype)
    one_TK = torch.ones_like(full.weights_TK)
    return (
        replace(full, weights_TK=one_TK, upstream=one_TD),
        replace(full, weights_TK=one_TK, x_TD=one_TD),
        replace(full, x_TD=one_TD, upstream=one_TD),
    )[m % IN_TURN]


CHAPTERS = (Chapter((RUN,), NAMES, draw_all, "every", (SINGLE, EP2, EP2_ETP2, TP2_EP2)),)
