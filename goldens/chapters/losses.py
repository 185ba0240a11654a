"""Golden of the losses: shares, choices, and every loss of a microbatch with its gradient.

What several ranks and microbatches make of losses is in `losses_of_steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, leaf, named
from moe_conformance.goldens.chapters import losses_of_steps
from moe_conformance.reference.losses import balance, over_ranks, reports, scaling
from moe_conformance.reference.losses import z_loss as z_losses
from moe_conformance.reference.routing import routes

_T, _E, _K, _C = 9, 8, 2, 0.25
_CASES: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"score": "softmax"},
    "softmax-of-chosen": {"score": "softmax_topk", "groups": (4, 2), "group_score": "max"},
    "sigmoid": {"score": "sigmoid", "groups": (4, 2), "group_score": "top2_sum"},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "groups": (2, 1), "group_score": "topk_sum"},
    "ties": {"score": "sigmoid"},
    "underflowed": {"score": "sigmoid"},
    "masked-expert": {"score": "softmax"},
    "padding-only": {"score": "sqrtsoftplus"},
    "no-tokens": {"score": "softmax"},
}


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return logits, forced choices with empty slots, packed sequences and padding; then what steps are made of."""
    found: dict[str, Tensor] = {}
    for case in _CASES:
        T = 0 if case == "no-tokens" else _T
        logits_TE = 2 * rng.standard_normal((T, _E))
        ids_TK = rng.integers(-1, _E, (T, _K))
        sequences_T = rng.integers(0, 4, T)
        padding_T = rng.random(T) < 0.25
        if case == "ties":
            logits_TE = logits_TE.round()
        if case == "underflowed":
            logits_TE[4:7] = -900  # below what the sum of scores of a token can be told from 0
            logits_TE[7] -= 100  # above
            padding_T[4:8] = False
        if case == "masked-expert":
            logits_TE[:, 3] = -inf
        if case == "padding-only":
            padding_T[:] = True
        found |= named(case, "in", {"logits_TE": logits_TE, "ids_TK": ids_TK, "sequences_T": sequences_T})
        if case != "masked-expert":
            found |= named(case, "in", {"padding_T": padding_T})
    return found | losses_of_steps.draw(rng)


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return shares and choices, the losses of the drawn ids, and all gradients of the logits."""
    found: dict[str, Tensor] = {}
    for case, settings in _CASES.items():
        drawn, score = given(inputs, case), settings["score"]
        leaf_TE, ids_TK = leaf(drawn["logits_TE"]), drawn["ids_TK"]
        padding_T = drawn["padding_T"].bool() if "padding_T" in drawn else None
        charged = {"score": score, "coefficient": _C, "padding_T": padding_T}
        sequences = int(drawn["sequences_T"].max()) + 3 if len(ids_TK) else 2  # some of which have no token at all
        values = {
            "auxiliary": oracle.auxiliary_loss(leaf_TE, ids_TK, **charged),
            "sequence": oracle.sequence_loss(leaf_TE, ids_TK, drawn["sequences_T"], **charged),
            "sequence-of-all": oracle.sequence_loss(
                leaf_TE, ids_TK, drawn["sequences_T"], divisor=sequences, **charged
            ),
            "z": oracle.z_loss(leaf_TE, coefficient=_C, padding_T=padding_T),
        }
        gradients = {f"d{name}_TE": torch.autograd.grad(value, leaf_TE)[0] for name, value in values.items()}
        answers: dict[str, object] = {
            "p_TE": oracle.normalised_scores(drawn["logits_TE"], score),
            "choices_TK": oracle.choices(drawn["logits_TE"], top_k=_K, padding_T=padding_T, **settings),
            "counts_E": oracle.choice_counts(ids_TK, _E, padding_T=padding_T),
        }
        found |= named(case, "out", answers | values | gradients)
    return found | losses_of_steps.work_out(inputs, oracle)


_REQUIREMENTS = tuple(f"LOSS-{number:02}" for number in range(1, 20))

_ORACLE = functions(balance, z_losses, over_ranks, scaling, reports, routes)

CHAPTER = Chapter(2401, _REQUIREMENTS, _ORACLE, draw, work_out)
