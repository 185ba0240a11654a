"""Saying at which of the places that the suite sees a run was still right."""

from __future__ import annotations

from moe_conformance.judging.exchange.weights import wrong_weights
from moe_conformance.judging.observed.row_gradients_compared import compare_out_gradients, compare_rows_gradients
from moe_conformance.judging.observed.run import Reading


def before_experts(reading: Reading) -> str | None:
    """Say what was wrong already when it was handed to the experts, or None: y and dx cannot be right then."""
    matching = reading.matching
    scaled = any(m.entry.scale != 1 and reading.applied_to(m.entry) != "input" for m in matching.matches)
    if matching.lost or matching.extra or matching.corrupt or scaled:
        return "the rows were already wrong when they were handed to the experts"
    if wrong_weights(reading):
        return "the weights were already wrong when they were handed to the experts"
    return None


def last_seen_right(reading: Reading) -> str:
    """Say how far the gradient of x came, from the experts' answers back, before it went wrong."""
    before = before_experts(reading)
    if before:
        return before
    backward = [match for match in reading.matching.matches if reading.goes_backward(match.entry.microbatch)]
    arrived, left = compare_out_gradients(reading), compare_rows_gradients(reading)
    if len(arrived) < len(backward):
        return "no gradient had reached the experts' output: combine detached it"
    if any(compared.wrong for compared in arrived):
        return "the gradient was already wrong when it reached the experts' output: combine's backward"
    if any(reading.handed(match.entry).rows_grad_RD is None for match in backward):
        return "the rows are detached from x"
    if any(compared.wrong for compared in left):
        return "the gradient reached the experts' output right and left their input wrong"
    return "the gradient left the experts right and reached x wrong: dispatch's backward"
