"""Judge of gradients compared with finite differences of the forward, without an oracle."""

from __future__ import annotations

import math

from torch import Tensor

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.parameters import assembled
from moe_conformance.judging.shared.equivalence.runs import RunTwins, read_twin
from moe_conformance.judging.verdict import AbsentGradient, NotOffered, Tally, WrongGradient
from moe_conformance.workloads.laws import Nudged, nudged

_ROUNDING = 2.0**-50  # rounding error of the loss, relative to the sum of its addends' magnitudes
_CURVATURE = 2.0**-24  # relative likewise: ten thousand times that of a layer, and a tenth of a float32 rounding over h


def judge_differences(reading: Reading, twins: RunTwins, tally: Tally) -> None:
    """Decide whether gradients are the derivative of the forward along a random direction.

    The loss is sum <upstream, y>. The error of its central difference over h is C h^2, with C from the difference over
    2 h, plus rounding. If the two differences differ by more than `_CURVATURE` of the addends, the forward is not
    smooth. Parameters of several pipeline stages move together, and so do the losses of the stages.

    Raises:
        NotOffered: the backend finishes no gradients, or ran none of the equivalent runs; and nothing is wrong.
        AbsentGradient: there is no gradient to compare.
        WrongGradient: it is not the derivative, or the forward is not smooth enough to have one.
    """
    findings, not_offered = list[Finding](), ""
    everybody, addends = tuple(range(len(reading.ranks))), _loss(reading, magnitude=True)
    for nudge in nudged(reading.outcome.workload):
        ran = twins(nudge.twins)
        if missing := [twin_run.why_not for twin_run in ran if twin_run.outcome is None]:
            not_offered = "; ".join(missing)
            continue
        up, down, far_up, far_down = (_loss(read_twin(twin_run)) for twin_run in ran)
        slope, wide = (up - down) / (2 * nudge.h), (far_up - far_down) / (4 * nudge.h)
        try:
            product = _along(reading, nudge)
        except NotOffered as error:
            not_offered = str(error)
            continue
        if sentence := _said(nudge, slope, wide, product, addends, tally):
            findings.append(Finding(nudge.what, sentence, everybody, abs(slope - product)))
        else:
            tally.add(elements=sum(direction.numel() for direction in nudge.directions.values()))
    if findings:
        fail(WrongGradient, "gradient", findings)
    if not_offered:
        raise NotOffered(not_offered)


def _said(nudge: Nudged, slope: float, wide: float, product: float, addends: float, tally: Tally) -> str:
    """Return what is wrong with the slope over h, given that over 2 h and that of the gradient; "" if nothing is."""
    where = f"along a random direction in {nudge.what} the loss has the slope {slope:.9g}"
    curvature = abs(wide - slope)
    if not curvature <= _CURVATURE * addends:
        steps = f"with a step of {nudge.h:.3g}, and {wide:.9g} with twice the step"
        return f"{where} {steps}: the forward has steps, and is not differentiable at this precision"
    allowed = curvature + 2 * _ROUNDING * addends / nudge.h
    if abs(slope - product) <= allowed:
        return ""
    ratio = abs(slope - product) / allowed if allowed else math.inf
    tally.beyond = max(tally.beyond, ratio if ratio < 1e300 else 1e300)  # also True for NaN
    times = f"{ratio:.3g} x the allowed error {allowed:.2g}"
    return f"{where}; the gradient gives {product:.9g} ({times})"


def _loss(reading: Reading, magnitude: bool = False) -> float:
    """Return the sum over all tokens of <upstream, y>, or of its addends' magnitudes."""
    total = 0.0
    for m, ranks in enumerate(reading.batches):
        for rank, batch in enumerate(ranks):
            y = reading.seen(m, rank).y
            assert y is not None  # other judges decide its shape
            addends = batch.upstream.double() * y.double()
            total += float((addends.abs() if magnitude else addends).sum())
    return total


def _along(reading: Reading, nudge: Nudged) -> float:
    """Return the inner product of the gradient and the direction."""
    if nudge.what == "parameters":
        return sum(_product(grad, nudge.directions[key]) for (_, key), grad in assembled(reading).items())
    total = 0.0
    for rank, direction in nudge.directions.items():
        seen = reading.seen(0, rank)
        grad = (seen.dx_TD if nudge.what == "x" else seen.dweights_TK).value
        if grad is None and direction.numel():
            raise AbsentGradient("gradient", f"the gradient of {nudge.what} on rank {rank} is None", ranks=(rank,))
        total += 0.0 if grad is None else _product(grad, direction)
    return total


def _product(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other).sum())
