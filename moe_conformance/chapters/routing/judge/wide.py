"""Judges of a router in a wider dtype than its tokens: values have the errors of that dtype."""

from __future__ import annotations

from moe_conformance.judging.compare.bounded import compare, too_narrow
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.router.expected import WideExpected
from moe_conformance.judging.shared.router.routers import expected_of, judge_router_weights, judge_selection
from moe_conformance.judging.verdict import Tally, WrongForm, WrongWeight


def judge_wide(reading: Reading, tally: Tally) -> None:
    """Decide whether logits, selection and weights are within the rounding errors of `Config.router_dtype`.

    They may be returned in any dtype, and gradients may be computed in any. Logits are compared if they are returned.

    Raises:
        WrongForm: logits or weights have another shape.
        WrongSelection, WrongWeight: experts, logits or weights are beyond the errors of that dtype.
    """
    usual = expected_of(reading)
    expected = WideExpected(usual.workload, usual.ids, usual.divisor)
    _judge_logits(reading, expected, tally)
    judge_selection(reading, tally, expected)
    judge_router_weights(reading, tally, expected)


def _judge_logits(reading: Reading, expected: WideExpected, tally: Tally) -> None:
    findings = []
    for m, rank in expected.places:
        target, logits_TE = expected.logits_target((m, rank)), reading.seen(m, rank).router.logits_TE
        if logits_TE is None:
            continue
        if logits_TE.shape != target.expected.shape:
            shapes = f"{tuple(logits_TE.shape)} instead of {tuple(target.expected.shape)}"
            raise WrongForm("route", f"the logits of rank {rank} have the shape {shapes}", ranks=(rank,))
        worst = compare(logits_TE, *target, tally, rank)
        if not worst.holds:
            narrow = too_narrow(logits_TE, target, expected.dtype)
            cause = f"; likely cause: they were {narrow}" if narrow else ""
            sentence = f"the logits of rank {rank} are wrong: {worst}{cause}"
            findings.append(Finding("logits", sentence, (rank,), worst.size))
    if findings:
        fail(WrongWeight, "route", findings)


def judge_layer_dtype(reading: Reading, tally: Tally) -> None:
    """Decide whether the output of a layer has the dtype of its tokens, whatever the dtype of its router.

    Raises:
        WrongForm: the output has another dtype.
    """
    dtype = reading.outcome.workload.config.dtype
    for m, ranks in enumerate(reading.batches):
        for rank in range(len(ranks)):
            seen = reading.seen(m, rank)
            if seen.y_dtype != dtype:
                router_dtype = reading.outcome.workload.config.router_dtype
                sentence = (
                    f"y of rank {rank} is {seen.y_dtype}; expected {dtype}, as x has, with a router in {router_dtype}"
                )
                raise WrongForm("combine", sentence, ranks=(rank,))
            tally.add(elements=1, rank=rank)
