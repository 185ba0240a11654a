"""Judges of non-finite tokens: they are delivered, and change no result of other tokens or experts.

The expected values of the other tokens are those of a run in which the non-finite tokens are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, places_of
from moe_conformance.judging.shared.experts import experts
from moe_conformance.judging.shared.experts.expected import ExpertsExpected
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Mismatch,
    NotOffered,
    Stage,
    Tally,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.scenarios.outcome import Microbatch
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Workload

Values = Callable[[Microbatch], Tensor | None]


def spoilt_without_slot(workload: Workload) -> bool:
    """Return whether all non-finite values belong to tokens without a slot."""
    bad = [(_bad_x(batch) | _bad_upstream(batch), _routed(batch)) for ranks in workload.batches for batch in ranks]
    return not any(bool((bad_T & routed_T).any()) for bad_T, routed_T in bad)


def unfilled(workload: Workload) -> bool:
    """Return whether no expert is filled up to a capacity with unselected tokens of weight 0 (DROP-12)."""
    return not workload.config.capacity.padded


def judge_other_tokens(reading: Reading, tally: Tally) -> None:
    """Decide whether y and the gradients of every finite token are the same as without non-finite tokens.

    The gradients are those of x and of the weights. Results of a token without a slot are zero. The gradient of a token
    with a slot may have any value if the token or its upstream gradient is not finite. If the backend claims that
    non-finite values reach other tokens, elements may be non-finite instead; finite ones are still compared.

    Raises:
        NotOffered: non-finite values reached other tokens, as claimed, and all else is right.
        AbsentGradient, WrongForm: y or a gradient is None, or of another shape.
        WrongOutput, WrongGradient: an element differs; with the backend's own experts, by more than rounding.
    """
    if _judge_all(reading, tally, may_spread=_spreads(reading)):
        raise NotOffered(_SPREADS)


@judge(WrongOutput, "combine")
def judge_delivered(reading: Reading) -> Comparisons:
    """Decide whether y of a token whose elements are all NaN is non-finite too, if the token has a slot.

    Raises:
        WrongOutput: y is finite: the token was replaced, or not delivered.
    """
    for m, rank in _places(reading):
        batch, y_TD = reading.batches[m][rank], reading.seen(m, rank).y
        for t in (batch.x_TD.isnan().all(1) & _routed(batch)).nonzero().flatten().tolist():
            finite = y_TD is not None and bool(y_TD[t].isfinite().all())
            sentence = f"rank {rank} token {t} is NaN and routed to experts {_experts(batch, t)}, but its y is finite"
            wrong = Finding("repaired", f"{sentence}; expected: non-finite", (rank,))
            yield Comparison(rank, wrong if finite else "", pairs=1)


def judge_other_experts(reading: Reading, tally: Tally) -> None:
    """Decide whether experts without non-finite tokens have the gradients of their own tokens alone.

    These are all experts if non-finite tokens have no slot.

    Raises:
        NotOffered: the backend claims that non-finite values reach other experts.
        NotOffered, Uncovered, AbsentGradient, WrongForm, WrongGradient: as `experts.judge_expert_gradients`.
    """
    if _spreads(reading):
        raise NotOffered(_SPREADS)
    outcome = replace(reading.outcome, workload=_cleaned(reading.outcome.workload))
    clean, free = Reading(outcome, reading.ranks), _reached(reading.outcome.workload)
    try:
        experts.judge_expert_gradients(clean, tally, free=free)
    except WrongGradient as wrong:
        try:
            experts.judge_expert_gradients(clean, Tally(), free=free | _not_finite(reading))
        except Mismatch:
            raise wrong from None
        raise wrong.retold(note=_DESIGN) from None


# ---- how -----------------------------------------------------------------------------------------------------


_SPREADS = "the backend claims non_finite = 'all': values that are not finite reach other tokens"


_DESIGN = "; a backend that multiplies by one-hot tensors and so spreads such values claims non_finite = 'all'"


def _not_finite(reading: Reading) -> frozenset[int]:
    """Return the experts that have a non-finite gradient."""
    grads = [(key, grad.value) for rank in reading.ranks for key, grad in (rank.grads_final or {}).items()]
    return frozenset(
        key[1] for key, value in grads if key[1] is not None and value is not None and not bool(value.isfinite().all())
    )


def _spreads(reading: Reading) -> bool:
    return reading.claims.non_finite == "all"


def _by_design(reading: Reading) -> str:
    """Return a note with the claim under which nothing is wrong, "" if there is none."""
    try:
        _judge_all(reading, Tally(), may_spread=True)
    except Mismatch:
        return ""
    return _DESIGN


def _judge_all(reading: Reading, tally: Tally, *, may_spread: bool) -> int:
    """Judge y and the gradients; return the number of non-finite elements where these are allowed."""
    targets = _targets(reading)

    def bad(batch: Batch) -> Tensor:
        return _bad_x(batch) | _bad_upstream(batch)

    def dweights(seen: Microbatch) -> Tensor | None:
        return seen.dweights_TK.value

    of_weights = "the gradient of the weights"
    return (
        _judge(reading, tally, "y", lambda seen: seen.y, targets["y"], _bad_x, may_spread)
        + _judge(reading, tally, "dx", lambda seen: seen.dx_TD.value, targets["dx"], bad, may_spread)
        + _judge(reading, tally, of_weights, dweights, targets["dweights"], bad, may_spread)
    )


def _judge(
    reading: Reading,
    tally: Tally,
    name: str,
    actual: Values,
    targets: Mapping[Place, Target],
    bad: Callable[[Batch], Tensor],
    may_spread: bool,
) -> int:
    """Judge one kind of result of all other tokens; return the number of non-finite elements that are allowed."""
    error: type[Mismatch] = WrongOutput if name == "y" else WrongGradient
    stage: Stage = "combine" if name == "y" else "gradient"
    findings, spread = [], 0
    non_finite = [
        f"rank {rank} token {t}"
        for m, rank in _places(reading)
        for t in bad(reading.batches[m][rank]).nonzero().flatten().tolist()
    ]
    for m, rank in _places(reading):
        batch, target = reading.batches[m][rank], targets[m, rank]
        value = actual(reading.seen(m, rank))
        if value is None or value.shape != target.expected.shape:
            what = "None" if value is None else f"of shape {tuple(value.shape)}, not {tuple(target.expected.shape)}"
            kind = AbsentGradient if value is None and stage == "gradient" else WrongForm
            raise kind(stage, f"{name} of rank {rank} is {what}", ranks=(rank,))
        judged_T = ~(bad(batch) & _routed(batch))
        for t in judged_T.nonzero().flatten().tolist():
            value_D, expected_D = value[t], target.expected[t]
            if may_spread:
                reached_D = ~value_D.isfinite()
                spread += int(reached_D.sum())
                value_D = torch.where(reached_D, expected_D.to(value_D.dtype), value_D)
            worst = compare(value_D, expected_D, target.allowed[t], tally, rank)
            if not worst.holds:
                state = "has no slot" if bool(bad(batch)[t]) else "is finite"
                others = f"the token {state}, and {some(non_finite)} are not finite"
                sentence = f"{name} of rank {rank} token {t} is {worst}; {others}"
                findings.append(Finding("spread", sentence, (rank,), worst.size))
    if findings:
        fail(error, stage, findings, note="" if may_spread else _by_design(reading))
    return spread


def _targets(reading: Reading) -> dict[str, dict[Place, Target]]:
    """Return the expected y, dx and dweights with non-finite tokens and upstream gradients set to zero."""
    clean = _cleaned(reading.outcome.workload)
    if isinstance(reading.outcome.workload.run, ExpertsStep):
        answers = ExpertsExpected.of(reading, clean)
        by_name = {"y": answers.y, "dx": answers.dx, "dweights": answers.dweights}
        return {name: {place: target(place) for place in _places(reading)} for name, target in by_name.items()}
    exact = Reading(replace(reading.outcome, workload=clean), reading.ranks).expected
    found: dict[str, dict[Place, Target]] = {"y": {}, "dx": {}, "dweights": {}}
    for m, rank in _places(reading):
        for name, value in (("y", exact.y[m][rank]), ("dx", exact.dx[m][rank])):
            found[name][m, rank] = Target(value, torch.zeros_like(value))
        found["dweights"][m, rank] = Target(exact.dweights[m][rank], exact.dweights_allowed[m][rank])
    return found


def _cleaned(workload: Workload) -> Workload:
    batches = tuple(tuple(_clean(batch) for batch in ranks) for ranks in workload.batches)
    return replace(workload, batches=batches)


def _clean(batch: Batch) -> Batch:
    return replace(
        batch,
        x_TD=batch.x_TD.masked_fill(_bad_x(batch)[:, None], 0),
        upstream=batch.upstream.masked_fill(_bad_upstream(batch)[:, None], 0),
        weights_TK=batch.weights_TK.masked_fill(batch.ids_TK < 0, 0),
    )


def _places(reading: Reading) -> tuple[Place, ...]:
    return places_of(reading.outcome.workload, range(len(reading.ranks)))


def _bad_x(batch: Batch) -> Tensor:
    return ~batch.x_TD.isfinite().all(1)


def _bad_upstream(batch: Batch) -> Tensor:
    return ~batch.upstream.isfinite().all(1)


def _reached(workload: Workload) -> frozenset[int]:
    """Return the experts that non-finite tokens are routed to."""
    ids = [batch.ids_TK[_bad_x(batch) | _bad_upstream(batch)] for ranks in workload.batches for batch in ranks]
    return frozenset(int(e) for ids_BK in ids for e in ids_BK.flatten() if e >= 0)


def _routed(batch: Batch) -> Tensor:
    return (batch.ids_TK >= 0).any(1)


def _experts(batch: Batch, t: int) -> str:
    return some([str(e) for e in batch.ids_TK[t].tolist() if e >= 0])
