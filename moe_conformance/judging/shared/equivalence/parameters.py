"""Comparison of the experts' finished gradients of a run and of an equivalent run, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, Start, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.finished_gradients import finals_of, steps_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Shard, stages, whole
from moe_conformance.judging.shared.experts.expected import Key
from moe_conformance.judging.shared.experts.experts import expected_of
from moe_conformance.judging.verdict import AbsentGradient, NotOffered, Tally, Uncovered, WrongGradient
from moe_conformance.scenarios.outcome import Grad, RankOutcome
from moe_conformance.workloads.records.workload import ParameterKey
from moe_conformance.workloads.twins import Twin

_Whole = dict[tuple[int, Key], Tensor]  # by pipeline stage and parameter


def judge_same_parameters(original: Reading, twin: Twin, other: Reading, tally: Tally) -> None:
    """Decide whether the experts' gradients equal those of the original in every step of the equivalent run.

    They are equal to the bit, on every rank and also before finishing, where the equivalent run requires it. Otherwise
    the gradients, put together from their shards, agree within the rounding errors of both runs. For a backend that
    finishes no gradients there are no finished ones to compare.

    Raises:
        Uncovered: the ranks do not hold some gradient whole.
        AbsentGradient: the equivalent run finishes no gradients, and the original did.
        WrongGradient: an element differs; or a gradient that has to be equal to the bit is present in one run only.
    """
    if "parameters" in twin.workload.twist.unasked:
        _judge_absent(other, tally, twin)
    elif twin.bits:
        _judge_equal(original, tally, twin, other)
    else:
        _require_near(original, twin, other, tally)


@judge(WrongGradient, "finish")
def _judge_equal(original: Reading, twin: Twin, other: Reading) -> Comparisons:
    """Decide whether every rank holds the same gradients before and after finishing; 0 and -0 are equal."""
    yield Start(f"run {twin.how}, ")
    steps = steps_of(other)
    for n, step in enumerate(steps):
        which = f" step {n}" if len(steps) > 1 else ""
        for before, now in zip(original.ranks, step.ranks, strict=True):
            for when, was, actual in _compared(before, now, first=n == 0):
                for name, expert in dict.fromkeys([*was, *actual]):
                    key = name, expert
                    if words := _difference(actual.get(key), was.get(key)):
                        whose = f"the gradient of {name} of expert {expert} on rank {now.rank} {when} finishing{which}"
                        yield Finding("parameters", f"{whose} {words}", (now.rank,))
                    else:
                        value = actual[key].value
                        yield Comparison(now.rank, elements=0 if value is None else value.numel())


_Grads = Mapping[ParameterKey, Grad]


def _compared(before: RankOutcome, now: RankOutcome, *, first: bool) -> Iterator[tuple[str, _Grads, _Grads]]:
    """Yield the gradients that must be equal: those at the end of a step, and those before finishing.

    From the second step on those before finishing may differ if gradients are finished: a backend may then reduce in
    the backward.
    """
    if first or before.grads_final is None:
        yield "before", before.grads_local, now.grads_local
    yield "after", before.grads_final or {}, now.grads_final or {}


def _difference(now: Grad | None, was: Grad | None) -> str:
    """Return how a gradient differs from that of the original, "" if it does not."""
    if now is None or was is None or (now.value is None) != (was.value is None):
        absent = now is None or now.value is None
        return "is missing; it exists in the original run" if absent else "exists; it is missing in the original run"
    if now.value is None or was.value is None:
        return ""
    forms = [(grad.shard, tuple(grad.value.shape), grad.value.dtype) for grad in (now, was) if grad.value is not None]
    if forms[0] != forms[1]:
        return f"is {forms[0]} instead of {forms[1]} in the original run"
    expected = was.value.double()
    worst = compare(now.value, expected, torch.zeros_like(expected))
    return "" if worst.holds else f"differs from the original run: {worst}"


def _require_near(original: Reading, twin: Twin, other: Reading, tally: Tally) -> None:
    """Raise unless every gradient, put together from its shards, is within the bounds of both runs."""
    try:
        before = assembled(original)
    except NotOffered:
        return
    now = assembled_again(twin, other)
    findings = list[Finding]()
    for (stage, (name, expert)), was in before.items():
        number = int(twin.numbers_E[expert])
        actual = now[stage, (name, number)]
        allowed = torch.zeros_like(was, dtype=torch.float64)
        # computing bounds costs more than everything else here
        if actual.shape != was.shape or bool((actual != was).any()):
            allowed = allowed_of(original, stage, (name, expert)) + allowed_of(other, stage, (name, number))
        there = f" (expert {number} in this run)" if number != expert else ""
        sentence = f"the gradient of {name} of expert {expert}{there} differs from the original run"
        findings += far_off(original, stage, (actual, was, allowed), sentence, tally)
    if findings:
        fail(WrongGradient, "finish", findings, start=f"run {twin.how}, ")


def far_off(
    reading: Reading, stage: int, compared: tuple[Tensor, Tensor, Tensor], sentence: str, tally: Tally
) -> list[Finding]:
    """Return a finding if a whole gradient is out of its bounds, else count its elements.

    Args:
        reading: The run; the ranks of its pipeline stage hold the gradient.
        stage: The number of the pipeline stage.
        compared: The gradient, the expected gradient and the allowed error, all of one shape.
        sentence: The start of the message; the worst element is added.
        tally: Counts elements.
    """
    worst = compare(*compared, tally)
    if worst.holds:
        return []
    holders = stages(reading.outcome.workload.layout)[stage]
    return [Finding("parameters", f"{sentence}: {worst}", holders, worst.size)]


def assembled_again(twin: Twin, other: Reading) -> _Whole:
    """Return `assembled` of an equivalent run, or of one of its steps, if the original has finished gradients.

    Raises:
        AbsentGradient: the equivalent run finishes none.
    """
    try:
        return assembled(other)
    except NotOffered as error:
        raise AbsentGradient(
            "finish", f"run {twin.how}, no gradient was finished, but in the original run: {error}"
        ) from error


@judge(WrongGradient, "finish")
def _judge_absent(other: Reading, twin: Twin) -> Comparisons:
    """Decide whether no parameter has a gradient; zeros are allowed if it had a buffer before it was frozen."""
    yield Start(f"run {twin.how}, ")
    for rank in other.ranks:
        for when, grads in (("before", rank.grads_local), ("after", rank.grads_final or {})):
            for (name, expert), grad in grads.items():
                if words := _not_absent(grad, (name, expert) in rank.buffered):
                    sentence = f"{name} of expert {expert} on rank {rank.rank} has {words} {when} finishing"
                    yield Finding("not required", sentence, (rank.rank,))
                yield Comparison(rank.rank, pairs=1)


def _not_absent(grad: Grad, buffered: bool) -> str:
    """Return what is wrong with a gradient of a parameter that requires none, "" if it is absent."""
    if grad.value is None:
        return ""
    if bool(grad.value.any()):
        return "a gradient instead of None"
    # zeros are wrong where there was no gradient before freezing: optimisers decay parameters that have one
    return "" if buffered else "a gradient of zeros instead of None, and had none when it was frozen,"


def assembled(reading: Reading) -> _Whole:
    """Return every finished gradient as a whole tensor, float64, summed over the ranks; zeros where it is None.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: a part of a gradient is held by no rank.
    """
    finals, workload = finals_of(reading), reading.outcome.workload
    divisor = expected_of(reading).divisor
    found: _Whole = {}
    for stage, ranks in enumerate(stages(workload.layout)):
        for key, full in workload.parameters.items():
            parts: dict[Shard, Tensor | None] = {}
            for rank in ranks:
                if key in finals[rank]:
                    parts.setdefault(finals[rank][key].shard, finals[rank][key].value)
            name, expert = key
            if not whole(parts) or expert is None:
                shards = f"the ranks hold only its shards {sorted(map(str, parts))}"
                raise Uncovered("finish", f"the gradient of {name} of expert {expert}: {shards}", ranks=ranks)
            found[stage, (name, expert)] = _joined(full, parts) * divisor
    return found


def _joined(full: Tensor, parts: dict[Shard, Tensor | None]) -> Tensor:
    joined = torch.zeros_like(full, dtype=torch.float64)
    for shard, value in parts.items():
        if value is not None:
            at = joined
            if shard is not None:
                dim, index, of = shard
                at = joined.narrow(dim, index * (full.shape[dim] // of), full.shape[dim] // of)
            at.copy_(value)
    return joined


def allowed_of(reading: Reading, stage: int, key: Key) -> Tensor:
    """Return the allowed error of a gradient that `assembled` returns."""
    expected = expected_of(reading)
    return expected.parameter(stage, key).allowed * expected.divisor
