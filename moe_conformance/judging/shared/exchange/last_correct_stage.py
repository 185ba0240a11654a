"""The first wrong tensor of those that the suite records, which tells which operation is wrong."""

from __future__ import annotations

from moe_conformance.judging.observed.row_gradients_compared import compare_out_gradients, compare_rows_gradients
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.weights import wrong_weights


def before_experts(reading: Reading) -> str | None:
    """Return the name of what is wrong at the experts' input, or None: y and dx cannot be right then."""
    matching = reading.matching
    scaled = any(m.entry.scale != 1 and reading.applied_to(m.entry) != "input" for m in matching.matches)
    if matching.lost or matching.extra or matching.corrupt or scaled:
        return "first wrong: the rows at the experts' input (dispatch)"
    if wrong_weights(reading):
        return "first wrong: the weights at the experts' input (dispatch)"
    return None


def last_seen_right(reading: Reading) -> str:
    """Return the name of the first wrong tensor on the way to dL/dx, and of the operation that computed it."""
    before = before_experts(reading)
    if before:
        return before
    backward = [match for match in reading.matching.matches if reading.goes_backward(match.entry.microbatch)]
    arrived, left = compare_out_gradients(reading), compare_rows_gradients(reading)
    if len(arrived) < len(backward):
        return "first wrong: the experts' output has no gradient (combine detached it)"
    if any(compared.wrong for compared in arrived):
        return "first wrong: the gradient at the experts' output (backward of combine)"
    if any(reading.handed(match.entry).rows_grad_RD is None for match in backward):
        return "first wrong: the delivered rows are detached from x (dispatch)"
    if any(compared.wrong for compared in left):
        return "first wrong: the gradient at the experts' input, correct at their output (backward of the experts)"
    return "first wrong: dL/dx, since the gradient at the experts' input is correct (backward of dispatch)"
