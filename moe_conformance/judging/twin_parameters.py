"""The finished gradients of a run's experts beside those of its twin, parameter by parameter, put together again."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.judging.bounded import compare
from moe_conformance.judging.diagnosis import Finding, fail
from moe_conformance.judging.finals import finals_of
from moe_conformance.judging.own_expected import Key
from moe_conformance.judging.own_experts import expected_of
from moe_conformance.judging.places import Shard, stages, whole
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.verdict import NotOffered, Tally, Uncovered, WrongGradient
from moe_conformance.workloads.twins import Twin

_Whole = dict[tuple[int, Key], Tensor]  # of a pipeline stage; None where it is not there


def judge_same_parameters(original: Reading, twin: Twin, other: Reading, tally: Tally) -> None:
    """Decide whether every expert ends with the gradient that it has in the original, as often as its tokens come.

    To the bit where the twin says so, else within the rounding errors of both. A backend that finishes no gradients
    has none to compare.

    Raises:
        Uncovered: the ranks do not hold some gradient whole.
        WrongGradient: an element differs.
    """
    if "parameters" in twin.workload.twist.unasked:
        _require_absent(twin, other, tally)
        return
    try:
        before, now = assembled(original), assembled(other)
    except NotOffered:
        return
    assert twin.times is not None
    findings = []
    for (stage, (name, expert)), was in before.items():
        number = int(twin.numbers_E[expert])
        actual, expected = now[stage, (name, number)], was * twin.times
        allowed = torch.zeros_like(expected)
        if not twin.bits:
            allowed = twin.times * allowed_of(original, stage, (name, expert))
            allowed = allowed + allowed_of(other, stage, (name, number))
        worst = compare(actual, expected, allowed)
        if worst.holds:
            tally.add(elements=actual.numel())
        else:
            there = f" (expert {number} there)" if number != expert else ""
            times = f"{twin.times} times " if twin.times != 1 else ""
            sentence = f"the gradient of {name} of expert {expert}{there} is not {times}what it was: {worst}"
            holders = stages(original.outcome.workload.layout)[stage]
            findings.append(Finding("parameters", sentence, holders, worst.size))
    if findings:
        fail(WrongGradient, "finish", findings, start=f"run {twin.how}, ")


def _require_absent(twin: Twin, other: Reading, tally: Tally) -> None:
    """Raise if some parameter has a gradient; zeros in a buffer that was there before it was frozen are none."""
    findings = []
    for rank in other.ranks:
        for when, grads in (("before", rank.grads_local), ("after", rank.grads_final or {})):
            for (name, expert), grad in grads.items():
                if grad.value is not None and bool(grad.value.any()):
                    sentence = f"{name} of expert {expert} on rank {rank.rank} has a gradient {when} finishing"
                    findings.append(Finding("unasked", sentence, (rank.rank,)))
                else:
                    tally.add(pairs=1, rank=rank.rank)
    if findings:
        fail(WrongGradient, "finish", findings, start=f"run {twin.how}, ")


def assembled(reading: Reading) -> _Whole:
    """Return every finished gradient whole, float64, summed over the ranks and not averaged; zeros where it is None.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: some part of one is held by no rank.
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
                sentence = f"the gradient of {name} of expert {expert} is held in the parts {sorted(map(str, parts))}"
                raise Uncovered("finish", sentence, ranks=ranks)
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
    """Return by how much rounding may change a gradient that `assembled` returns."""
    expected = expected_of(reading)
    return expected.parameter(stage, key).allowed * expected.divisor
