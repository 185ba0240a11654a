"""Golden of the exchange: every delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, draw_ids, functions, given, named
from moe_conformance.reference.exchange import deliveries

_K, _E = 2, 6
_TOKENS = (5, 0, 3, 4)  # by rank
# name: the exchange groups, and the experts that each rank holds
_CASES: Mapping[str, tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]] = {
    "ep2-edp2": ([[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]),
    "ep2-etp2": ([[0, 1, 2, 3]], [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]),
    "ep4-uneven": ([[0, 1, 2, 3]], [[4], [0, 5], [1, 2], [3]]),
}


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return the ids of every rank, a fifth of the slots empty."""
    found: dict[str, Tensor] = {}
    for case in _CASES:
        for rank, T in enumerate(_TOKENS):
            found |= named(case, "in", {f"ids_TK-{rank}": draw_ids(rng, T, _K, _E)})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return deliveries (source, token, slot, expert, destination)."""
    found: dict[str, Tensor] = {}
    for case, placement in _CASES.items():
        drawn = given(inputs, case)
        ids = [drawn[f"ids_TK-{rank}"] for rank in range(len(_TOKENS))]
        pairs = oracle.deliveries(ids, *placement)
        rows = [[pair.source, pair.token, pair.slot, pair.expert, pair.destination] for pair in pairs]
        found |= named(case, "out", {"deliveries": rows})
    return found


CHAPTER = Chapter(2303, ("EXCH-01", "EXCH-02", "EXCH-03"), functions(deliveries), draw, work_out)
