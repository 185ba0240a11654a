"""Golden of padding: padded counts, and refusals of a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, named
from moe_conformance.reference.token_padding import bounds, padding

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


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return counts at multiples of the alignment and beside them."""
    found = named("counts", "in", {"counts_N": [0, 1, 4, 5, 63, 64, 65, 128, *rng.integers(200, size=4)]})
    for case in GROUPS:
        drawn_W = rng.choice([0, 1, 7, 8, 9, 12, 13, 25], size=4)
        tokens_W = {"alone": [7, 8, 9, 16], "quiet": [0, 0, 0, 0]}.get(case, drawn_W)
        found |= named(case, "in", {"tokens_W": tokens_W})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return counts, and what each group may do under each bound and refusal."""
    counts_N = inputs["counts/in/counts_N"].tolist()
    counts = {
        "aligned_AN": [[oracle.aligned(n, alignment=a) for n in counts_N] for a in ALIGNMENTS],
        "bounded_AN": [[oracle.bounded_count(n, alignment=a) for n in counts_N] for a in ALIGNMENTS],
        "by-default_N": [oracle.aligned(n) for n in counts_N],
    }
    found = named("counts", "out", counts)
    for case, groups in GROUPS.items():
        found |= named(case, "out", _of_groups(groups, inputs[f"{case}/in/tokens_W"].tolist(), oracle))
    return found


def _of_groups(groups: Groups, tokens: Sequence[int], oracle: Oracle) -> dict[str, object]:
    return {
        "padded_W": oracle.padded_counts(tokens, groups, alignment=A),
        "with-a-row_W": oracle.padded_counts(tokens, groups, alignment=A, needs_a_row=True),
        "legal_BRG": [
            [oracle.legal_refusals(refused, tokens, groups, bound, alignment=A) for refused in REFUSALS]
            for bound in BOUNDS
        ],
    }


REQUIREMENTS = ("PACK-01", "PACK-02", "PACK-11", "PACK-12")

CHAPTER = Chapter(2404, REQUIREMENTS, functions(padding, bounds), draw, work_out)
