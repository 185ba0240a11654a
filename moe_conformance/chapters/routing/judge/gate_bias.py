"""The bias of a router's gate: it is in the logits that select and that weigh, and has its gradient."""

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
    """Decide whether selection and weights are those of logits with the gate bias, and whether it gets its gradient.

    That is the gradient over the tokens of the pipeline stage; where the backend finishes no gradients, values are
    all that is judged.

    Raises:
        WrongForm, WrongSelection, WrongWeight: as `judge_selection` and `judge_router_weights`.
        Uncovered, AbsentGradient, WrongGradient: as `judge_finished_gradient`.
    """
    judge_selection(reading, tally)
    judge_router_weights(reading, tally)
    with suppress(NotOffered):
        judge_finished_gradient(reading, tally, expected_of(reading), GATE_BIAS)
