"""Judges of the gate bias, and of expert biases that alone decide because all scores are equal."""

from __future__ import annotations

from contextlib import suppress

import torch

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.router.expected import GATE_BIAS
from moe_conformance.judging.shared.router.routers import (
    expected_of,
    judge_finished_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.judging.verdict import NotOffered, Tally, WrongSelection


def judge_gate_bias(reading: Reading, tally: Tally) -> None:
    """Decide whether selection, weights and gradients are those of logits with the gate bias.

    The bias has the gradient over the tokens of its pipeline stage. If the backend finishes no gradients, only
    selection and weights are judged.

    Raises:
        WrongForm, WrongSelection, WrongWeight: as `judge_selection` and `judge_router_weights`.
        Uncovered, AbsentGradient, WrongGradient: as `judge_finished_gradient`.
    """
    judge_selection(reading, tally)
    judge_router_weights(reading, tally)
    with suppress(NotOffered):
        judge_finished_gradient(reading, tally, expected_of(reading), GATE_BIAS)


@judge(WrongSelection, "route")
def judge_near_biases(reading: Reading) -> Comparisons:
    """Decide whether every token selects the experts with the largest biases, where all scores are equal.

    Tokens are zero, so that rounding errors of logits and scores do not differ between experts. Unlike in
    `judge_selection`, no other choice is legal within rounding if the biases differ in float32.

    Raises:
        WrongForm, WrongSelection: a token has other experts.
    """
    expected = expected_of(reading)
    bias_E, dtype = expected.bias_E, expected.workload.config.dtype
    assert bias_E is not None
    rounded_E = bias_E.to(dtype)
    for place in expected.places:
        ids_TK, right_TK = expected.ids[place].sort(1).values, expected.choice(place).sort(1).values
        for t in (ids_TK != right_TK).any(1).nonzero().flatten().tolist():
            chosen, best = ids_TK[t].tolist(), right_TK[t].tolist()
            others_E = torch.ones(len(rounded_E), dtype=torch.bool)
            others_E[chosen] = False
            tied = bool(others_E.any()) and bool(rounded_E[chosen].min() >= rounded_E[others_E].max())
            cause = f"; likely cause: the expert bias was rounded to {dtype}" if tied else ""
            wrong = f"rank {place[1]} token {t} selected {chosen}; expected {best}, the largest biases of equal scores"
            yield Comparison(place[1], Finding("bias", wrong + cause, (place[1],)))
        yield Comparison(place[1], pairs=ids_TK.numel())
