"""The part of the golden of capacity on receive budgets: the most rows possible, and what may be delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Oracle, draw_ids, given, named

_K, _E = 2, 6
_TOKENS = (5, 0, 3, 4)  # by rank
_GROUPS, _HELD = ((0, 1, 2, 3),), ((0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5))  # ep 2, etp 2: a slot is two rows
_WORST: Sequence[tuple[int, Mapping[str, Any]]] = (  # experts of a rank
    (0, {}), (1, {}), (4, {}), (4, {"alignment": 8}), (3, {"alignment": 4, "equal_sizes": True}),
    (4, {"equal_sizes": True, "per_token": True}), (0, {"per_token": True}), (3, {"per_token": True}),
)  # fmt: skip
_ALIGNED: Sequence[Mapping[str, int]] = ({}, {"alignment": 4})
_BUDGETS = (((99,) * 4, _ALIGNED[0]), ((8, 8, 99, 99), _ALIGNED[0]), ((12,) * 4, _ALIGNED[1]), ((0,) * 4, _ALIGNED[0]))
_PAIRS = 2 * _K * sum(_TOKENS)  # at most


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the ids of every rank, and of every pair and attempt how often it arrives."""
    found: dict[str, Tensor] = {}
    for rank, T in enumerate(_TOKENS):
        found |= named("budgets", "in", {f"ids_TK-{rank}": draw_ids(rng, T, _K, _E)})
    slots = (rng.random(_PAIRS // 2) < 0.7).repeat(2)  # both shards of a slot, or none
    pairs = rng.random(_PAIRS) < 0.9
    twice = 1 + (np.arange(_PAIRS) == 3)
    found |= named("budgets", "in", {"arrivals_AP": np.stack([np.ones(_PAIRS), slots, pairs, twice]).astype(np.int64)})
    return found | named("budgets", "in", {"rows_BN": rng.integers(0, 6, (5, 3)), "budget_B": [0, 5, 7, 9, 12]})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return worst cases, which budgets are exceeded, and of every budget and attempt each rank's verdict."""
    drawn = given(inputs, "budgets")
    worst = [oracle.worst_case_rows(tokens, _K, held, **how) for tokens in (_TOKENS, (0, 0)) for held, how in _WORST]
    wants = list(zip(drawn["rows_BN"].tolist(), drawn["budget_B"].tolist(), strict=True))
    over = [[oracle.over_budget(rows, budget, **how) for rows, budget in wants] for how in _ALIGNED]
    ids = [drawn[f"ids_TK-{rank}"] for rank in range(len(_TOKENS))]
    wanted = oracle.deliveries(ids, _GROUPS, _HELD)
    attempts = [
        [pair for pair, times in zip(wanted, arrivals, strict=False) for _ in range(times)]
        for arrivals in drawn["arrivals_AP"].tolist()
    ]
    legal = [
        [oracle.legal_deliveries(delivered, wanted, budgets, **how) for delivered in attempts]
        for budgets, how in _BUDGETS
    ]
    answers: dict[str, object] = {"worst_N": worst, "over_AB": over, "legal_BAR": legal}
    for attempt, delivered in enumerate(attempts):
        for rank, kept_TK in enumerate(oracle.delivered_slots(delivered, ids)):
            answers[f"delivered_TK-{attempt}{rank}"] = kept_TK
    return named("budgets", "out", answers)
