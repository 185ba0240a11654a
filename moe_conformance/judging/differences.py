"""Gradients beside differences of the forward that ran: nobody has to know the right answer."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.judging.diagnosis import Finding, fail
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.twin_parameters import assembled
from moe_conformance.judging.twins import RunTwins, read_twin
from moe_conformance.judging.verdict import AbsentGradient, NotOffered, Tally, WrongGradient
from moe_conformance.workloads.laws import Nudged

_ROUNDING = 2.0**-50  # of the loss, relative to the sum of its addends' magnitudes


def judge_differences(reading: Reading, nudges: list[Nudged], twins: RunTwins, tally: Tally) -> None:
    """Decide whether gradients are the derivative of the forward along a random direction.

    The loss is sum <upstream, y>. Its central difference over h errs by C h^2, C measured from that over 2 h, and by
    rounding. Parameters of several pipeline stages move together, and so do the losses of the stages.

    Raises:
        NotOffered: the backend finishes no gradients, or ran none of the twins.
        AbsentGradient: there is no gradient to compare.
        WrongGradient: it is another's derivative.
    """
    findings, addends = [], _loss(reading, magnitude=True)
    for nudge in nudges:
        ran = twins(nudge.twins)
        if missing := [each.why_not for each in ran if each.outcome is None]:
            raise NotOffered("; ".join(missing))
        up, down, far_up, far_down = (_loss(read_twin(each)) for each in ran)
        h = nudge.h
        slope, wide = (up - down) / (2 * h), (far_up - far_down) / (4 * h)
        allowed = abs(wide - slope) + 2 * _ROUNDING * addends / h
        told = _along(reading, nudge)
        if not abs(slope - told) <= allowed:
            sentence = (
                f"along a random direction in {nudge.what} the loss has the slope {slope:.9g}, and the gradient says "
                f"{told:.9g} ({abs(slope - told) / allowed:.3g} x the allowed {allowed:.2g})"
            )
            findings.append(Finding(nudge.what, sentence, tuple(range(len(reading.ranks))), abs(slope - told)))
        tally.add(elements=sum(direction.numel() for direction in nudge.directions.values()))
    if findings:
        fail(WrongGradient, "gradient", findings)


def _loss(reading: Reading, magnitude: bool = False) -> float:
    """Return the sum over all tokens of <upstream, y>, or of the magnitudes of its addends."""
    total = 0.0
    for m, ranks in enumerate(reading.batches):
        for rank, batch in enumerate(ranks):
            y = reading.seen(m, rank).y
            assert y is not None  # its form is judged elsewhere
            addends = batch.upstream.double() * y.double()
            total += float((addends.abs() if magnitude else addends).sum())
    return total


def _along(reading: Reading, nudge: Nudged) -> float:
    """Return the product of the gradient and the direction."""
    if nudge.what == "parameters":
        return sum(_product(grad, nudge.directions[key]) for (_, key), grad in assembled(reading).items())
    total = 0.0
    for rank, direction in nudge.directions.items():
        seen = reading.seen(0, rank)
        grad = (seen.dx_TD if nudge.what == "x" else seen.dweights_TK).value
        if grad is None and direction.numel():
            raise AbsentGradient("gradient", f"rank {rank} has no gradient of {nudge.what}", ranks=(rank,))
        total += 0.0 if grad is None else _product(grad, direction)
    return total


def _product(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other).sum())
