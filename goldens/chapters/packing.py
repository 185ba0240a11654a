"""Goldens of padding: padded counts, refusals of a bound, and the padded layer with every gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Literal

import numpy as np
from torch import Tensor

from goldens.chapter import Chapter, given, named
from goldens.gradients import gradients, leaf, prefixed
from goldens.small_layer import D, K, draw_experts, draw_tokens, expert_leaves, experts_of
from reference import packing, padding_bounds

Groups = Sequence[Sequence[int]]

A = 8  # alignment, where a case does not vary it
ALIGNMENTS, BOUNDS = (1, 5, 64), (0, 7, 8, 9, 12, 24)
REFUSALS = tuple(product((False, True), repeat=4))
# name: the exchange groups of four ranks
GROUPS: Mapping[str, Groups] = {
    "pairs": ((0, 1), (2, 3)),
    "one-group": ((3, 1, 0, 2),),
    "alone": ((0,), (1,), (2,), (3,)),  # counts at the bounds and beside them
    "quiet": ((0, 2), (1, 3)),  # no token on any rank
}
# name: the leading dimensions, and the rows to which they are padded
PADDED: Mapping[str, tuple[tuple[int, ...], int]] = {
    "padded": ((5,), 8), "full": ((2, 2), 4), "no-token": ((2, 0), 3), "one-token": ((), 2),
}  # fmt: skip
PLACES: tuple[Literal["output", "input"], ...] = ("output", "input")


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return counts at multiples of the alignment and beside them, and tokens of cases with and without any."""
    found = named("counts", "in", {"counts_N": [0, 1, 4, 5, 63, 64, 65, 128, *rng.integers(200, size=4)]})
    for case in GROUPS:
        drawn_W = rng.choice([0, 1, 7, 8, 9, 12, 13, 25], size=4)
        tokens_W = {"alone": [7, 8, 9, 16], "quiet": [0, 0, 0, 0]}.get(case, drawn_W)
        found |= named(case, "in", {"tokens_W": tokens_W})
    found |= draw_experts(rng)
    for case, (lead, P) in PADDED.items():
        found |= draw_tokens(rng, case, prod(lead))
        found |= named(case, "in", {"rows_PD": rng.standard_normal((P, D)), "rows_PK": rng.standard_normal((P, K))})
    return found


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return counts, what each group may do under each bound and refusal, outputs and gradients."""
    counts_N = inputs["counts/in/counts_N"].tolist()
    counts = {
        "aligned_AN": [[packing.aligned(n, alignment=a) for n in counts_N] for a in ALIGNMENTS],
        "bounded_AN": [[padding_bounds.bounded_count(n, alignment=a) for n in counts_N] for a in ALIGNMENTS],
        "by-default_N": [packing.aligned(n) for n in counts_N],
    }
    found = named("counts", "out", counts)
    for case, groups in GROUPS.items():
        found |= named(case, "out", _of_groups(groups, inputs[f"{case}/in/tokens_W"].tolist()))
    for case, (lead, P) in PADDED.items():
        own = given(inputs, case)
        found |= named(case, "out", {**_padding(own, lead, P), **_layer(own, expert_leaves(inputs), lead, P)})
    return found


def _of_groups(groups: Groups, tokens: Sequence[int]) -> dict[str, object]:
    return {
        "padded_W": packing.padded_counts(tokens, groups, alignment=A),
        "with-a-row_W": packing.padded_counts(tokens, groups, alignment=A, needs_a_row=True),
        "may-refuse-unequal_G": padding_bounds.may_refuse_unequal(tokens, groups),
        "legal_BRG": [
            [padding_bounds.legal_refusals(refused, tokens, groups, bound, alignment=A) for refused in REFUSALS]
            for bound in BOUNDS
        ],
    }


def _padding(own: Mapping[str, Tensor], lead: Sequence[int], P: int) -> dict[str, Tensor]:
    """Return what `pad` and `trim` make, and their gradients."""
    leaves = {name: leaf(own[name]) for name in ("x_TD", "weights_TK")}
    padded = packing.pad(leaves["x_TD"], own["ids_TK"], leaves["weights_TK"], P)
    padded_from = gradients([padded.x_PD, padded.weights_PK], leaves, [own["rows_PD"], own["rows_PK"]])
    rows_PD = leaf(own["rows_PD"])
    y_LD = packing.trim(rows_PD, lead)
    trimmed_from = gradients([y_LD], {"rows_PD": rows_PD}, [own["dy_TD"].reshape(*lead, D)])
    return {**prefixed("pad", {**padded._asdict(), **padded_from}), **prefixed("trim", {"y_LD": y_LD, **trimmed_from})}


def _layer(
    own: Mapping[str, Tensor], parameters: Mapping[str, Tensor], lead: Sequence[int], P: int
) -> dict[str, Tensor]:
    """Return the output of the padded layer and all its gradients, for both places of the weights."""
    x_LD, dy_LD = (own[name].reshape(*lead, D) for name in ("x_TD", "dy_TD"))
    leaves = {"x_LD": leaf(x_LD), "weights_TK": leaf(own["weights_TK"]), **parameters}
    inputs = leaves["x_LD"], own["ids_TK"], leaves["weights_TK"], experts_of(leaves), P
    found: dict[str, Tensor] = {}
    for place in PLACES:
        y_LD = packing.padded_forward(*inputs, weights_at=place)
        found |= prefixed(place, {"y_LD": y_LD, **gradients([y_LD], leaves, [dy_LD])})
    return found


REQUIREMENTS = ("PACK-01", "PACK-02", "PACK-03", "PACK-04", "PACK-05", "PACK-06", "PACK-11", "PACK-12", "PACK-14")

CHAPTER = Chapter(2404, REQUIREMENTS, draw, work_out)
