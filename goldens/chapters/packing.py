"""Goldens of padding: padded counts, refusals of a bound, and the padded layer with every gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from goldens.chapter import Chapter
from goldens.small_layer import D, K, draw_experts, draw_tokens, expert_leaves, experts_of
from goldens.values import gradients, kept, leaf, real, whole
from reference import packing, padding_bounds

A = 8  # alignment, where a case does not vary it
ALIGNMENTS, BOUNDS = (1, 5, 64), (0, 7, 8, 9, 12, 24)
REFUSALS = tuple(product((False, True), repeat=4))
# name: the exchange groups of four ranks
GROUPS: Mapping[str, Sequence[Sequence[int]]] = {
    "pairs": ((0, 1), (2, 3)),
    "one-group": ((3, 1, 0, 2),),
    "alone": ((0,), (1,), (2,), (3,)),
    "quiet": ((0, 2), (1, 3)),  # no token on any rank
}
# name: the leading dimensions, and the rows to which they are padded
PADDED: Mapping[str, tuple[tuple[int, ...], int]] = {
    "padded": ((5,), 8), "full": ((2, 2), 4), "no-token": ((2, 0), 3), "one-token": ((), 2),
}  # fmt: skip
PLACES: tuple[Literal["output", "input"], ...] = ("output", "input")


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return counts at multiples of the alignment and beside them, and tokens of cases with and without any."""
    found = {"counts/in/counts_N": whole([0, 1, 4, 5, 63, 64, 65, 128, *rng.integers(200, size=4)])}
    for case in GROUPS:
        tokens_W = rng.choice([0, 1, 7, 8, 9, 12, 13, 25], size=4)
        found[f"{case}/in/tokens_W"] = torch.from_numpy(0 * tokens_W if case == "quiet" else tokens_W)
    found |= draw_experts(rng)
    for case, (lead, P) in PADDED.items():
        found |= draw_tokens(rng, case, prod(lead))
        found[f"{case}/in/rows_PD"], found[f"{case}/in/rows_PK"] = real(rng, P, D), real(rng, P, K)
    return found


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return counts, what each group may do under each bound and refusal, outputs and gradients."""
    counts_N = inputs["counts/in/counts_N"].tolist()
    aligned_AN = [[packing.aligned(n, alignment=a) for n in counts_N] for a in ALIGNMENTS]
    bounded_AN = [[padding_bounds.bounded_count(n, alignment=a) for n in counts_N] for a in ALIGNMENTS]
    found = {"counts/out/aligned_AN": whole(aligned_AN), "counts/out/bounded_AN": whole(bounded_AN)}
    found["counts/out/by-default_N"] = whole([packing.aligned(n) for n in counts_N])
    for case in GROUPS:
        found |= _groups(case, inputs[f"{case}/in/tokens_W"].tolist())
    for case in PADDED:
        found |= {**_padding(inputs, case), **_layer(inputs, case)}
    return found


def _groups(case: str, tokens: Sequence[int]) -> dict[str, Tensor]:
    groups = GROUPS[case]
    padded_W = packing.padded_counts(tokens, groups, alignment=A)
    with_a_row_W = packing.padded_counts(tokens, groups, alignment=A, needs_a_row=True)
    legal_BRG = [
        [padding_bounds.legal_refusals(refused, tokens, groups, bound, alignment=A) for refused in REFUSALS]
        for bound in BOUNDS
    ]
    return {
        f"{case}/out/padded_W": whole(padded_W),
        f"{case}/out/with-a-row_W": whole(with_a_row_W),
        f"{case}/out/legal_BRG": whole(legal_BRG),
        f"{case}/out/may-refuse-unequal_G": whole(padding_bounds.may_refuse_unequal(tokens, groups)),
    }


def _padding(inputs: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return what `pad` and `trim` make, and their gradients."""
    lead, P = PADDED[case]
    leaves = {name: leaf(inputs[f"{case}/in/{name}"]) for name in ("x_TD", "weights_TK")}
    padded = packing.pad(leaves["x_TD"], inputs[f"{case}/in/ids_TK"], leaves["weights_TK"], P)
    found = {f"{case}/out/pad.{name}": kept(value) for name, value in padded._asdict().items()}
    upstream = [inputs[f"{case}/in/{name}"] for name in ("rows_PD", "rows_PK")]
    for name, gradient in gradients([padded.x_PD, padded.weights_PK], leaves, upstream).items():
        found[f"{case}/out/pad.d{name}"] = gradient
    rows_PD, dy_LD = leaf(inputs[f"{case}/in/rows_PD"]), inputs[f"{case}/in/dy_TD"].reshape(*lead, D)
    y_LD = packing.trim(rows_PD, lead)
    found[f"{case}/out/trim.y_LD"] = kept(y_LD)
    found[f"{case}/out/trim.drows_PD"] = gradients([y_LD], {"rows": rows_PD}, [dy_LD])["rows"]
    return found


def _layer(inputs: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return the output of the padded layer and all its gradients, for both places of the weights."""
    lead, P = PADDED[case]
    x_LD, dy_LD = (inputs[f"{case}/in/{name}"].reshape(*lead, D) for name in ("x_TD", "dy_TD"))
    found = {}
    for place in PLACES:
        leaves = {"x_LD": leaf(x_LD), "weights_TK": leaf(inputs[f"{case}/in/weights_TK"]), **expert_leaves(inputs)}
        y_LD = packing.padded_forward(
            leaves["x_LD"], inputs[f"{case}/in/ids_TK"], leaves["weights_TK"], experts_of(leaves), P, weights_at=place
        )
        found[f"{case}/out/{place}.y_LD"] = kept(y_LD)
        for name, gradient in gradients([y_LD], leaves, [dy_LD]).items():
            found[f"{case}/out/{place}.d{name}"] = gradient
    return found


REQUIREMENTS = ("PACK-01", "PACK-02", "PACK-03", "PACK-04", "PACK-05", "PACK-06", "PACK-11", "PACK-12", "PACK-14")

CHAPTER = Chapter(2404, REQUIREMENTS, draw, work_out)
