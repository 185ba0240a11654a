"""Judges of a router in a wider dtype than its tokens: values have the errors of that dtype."""

from __future__ import annotations

from moe_conformance.judging.compare.bounded import compare, compared, too_narrow
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
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
    _judge_logits(reading, tally, expected)
    judge_selection(reading, tally, expected)
    judge_router_weights(reading, tally, expected)


@judge(WrongWeight, "route")
def _judge_logits(reading: Reading, expected: WideExpected) -> Comparisons:
    for m, rank in expected.places:
        target, logits_TE = expected.logits_target((m, rank)), reading.seen(m, rank).router.logits_TE
        if logits_TE is None:
            continue
        if logits_TE.shape != target.expected.shape:
            shapes = f"{tuple(logits_TE.shape)} instead of {tuple(target.expected.shape)}"
            raise WrongForm("route", f"the logits of rank {rank} have the shape {shapes}", ranks=(rank,))
        worst = compare(logits_TE, *target)
        narrow = None if worst.holds else too_narrow(logits_TE, target, expected.dtype)
        cause = f"; likely cause: they were {narrow}" if narrow else ""
        wrong = f"the logits of rank {rank} are wrong: {worst}{cause}"
        yield compared(rank, worst, "logits", wrong, logits_TE.numel())


@judge(WrongForm, "combine")
def judge_layer_dtype(reading: Reading) -> Comparisons:
    """Decide whether the output of a layer has the dtype of its tokens, whatever the dtype of its router.

    Raises:
        WrongForm: the output has another dtype.
    """
    config = reading.outcome.workload.config
    for m, ranks in enumerate(reading.batches):
        for rank in range(len(ranks)):
            dtype = reading.seen(m, rank).y_dtype
            expected = f"expected {config.dtype}, as x has, with a router in {config.router_dtype}"
            wrong = f"y of rank {rank} is {dtype}; {expected}" if dtype != config.dtype else ""
            yield Comparison(rank, wrong, elements=1)
