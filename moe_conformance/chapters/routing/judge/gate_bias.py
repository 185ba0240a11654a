"""Judge of the bias of a router's gate: part of the logits for selection and weights, with its own gradient."""

from __future__ import annotations

from contextlib import suppress

from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.router.expected import GATE_BIAS
from moe_conformance.judging.shared.router.routers import (
    expected_of,
    judge_finished_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.judging.verdict import NotOffered, Tally


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
