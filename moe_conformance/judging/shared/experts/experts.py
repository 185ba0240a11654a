"""Judges of the backend's own experts in an exchange: outputs and gradients within rounding, complete windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.explain.bounded_gradients import Held, explain_gradients, replicas, stage_of
from moe_conformance.judging.explain.bounded_tokens import explain_tokens
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.finished_gradients import finals_of, require_frozen
from moe_conformance.judging.observed.ledgers import early_read
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, Shard, shard_of, whole
from moe_conformance.judging.shared.experts.expected import ExpertsExpected
from moe_conformance.judging.shared.experts.mistakes import candidates_for, gradients_of
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Mismatch,
    NotOffered,
    Stage,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.scenarios.outcome import Grad, Microbatch
from moe_conformance.workloads.records.workload import ParameterKey


def expected_of(reading: Reading) -> ExpertsExpected:
    """Return the oracle's results for a reading, computed once."""
    return once(reading, _expect)


def _expect(reading: Reading) -> ExpertsExpected:
    return ExpertsExpected.of(reading)


# ---- tokens --------------------------------------------------------------------------------------------------


def judge_expert_outputs(reading: Reading, tally: Tally) -> None:
    """Decide whether y is the weighted sum of the routed experts' outputs, every element within its bound.

    A token without a routed slot, and an element whose addends are all zero, must be zero.

    Raises:
        WrongForm: y is missing or not (T, D).
        WrongOutput: an element lies outside its bound.
    """
    expected = expected_of(reading)
    _judge_tokens(reading, tally, _Judged("y", "experts", WrongOutput, lambda seen: seen.y, expected.y))


def judge_weight_place(reading: Reading, tally: Tally) -> None:
    """Decide whether the weights are applied where the session claims: before or after the experts.

    Counts only the elements in which the two places differ: each oracle's value is outside the bounds of the other.

    Raises:
        WrongForm, WrongOutput: as `judge_expert_outputs`.
    """
    expected = expected_of(reading)
    with tally.uncounted() as uncounted:
        judge_expert_outputs(reading, uncounted)
    elsewhere = "output" if expected.weights_at == "input" else "input"
    other = ExpertsExpected.of_session(expected.workload, elsewhere, "sum")
    for at in expected.places:
        ours, theirs = expected.y(at), other.y(at)
        apart_TD = (ours.expected - theirs.expected).abs() > ours.allowed + theirs.allowed
        tally.add(elements=int(apart_TD.sum()), rank=at[1])


def judge_expert_dx(reading: Reading, tally: Tally) -> None:
    """Decide whether the gradient of the tokens is that of the dense formulation, within rounding.

    Raises:
        AbsentGradient: there are tokens, and their gradient is None.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    expected = expected_of(reading)
    judged = _Judged("dx", "gradient", WrongGradient, lambda seen: seen.dx_TD.value, expected.dx)
    _judge_tokens(reading, tally, judged)


def judge_expert_dweights(reading: Reading, tally: Tally) -> None:
    """Decide whether the gradient of the routing weights is that of the dense formulation, within rounding.

    Raises:
        AbsentGradient: there are routed slots, and their weights have the gradient None.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    expected = expected_of(reading)
    judged = _Judged("dweights", "gradient", WrongGradient, lambda seen: seen.dweights_TK.value, expected.dweights)
    _judge_tokens(reading, tally, judged)


class _Judged(NamedTuple):
    """A result of a microbatch that is judged, and how."""

    name: str
    stage: Stage
    error: type[Mismatch]
    actual: Callable[[Microbatch], Tensor | None]
    target: Callable[[Place], Target]


def _judge_tokens(reading: Reading, tally: Tally, judged: _Judged) -> None:
    """Compare a result that has one row per token, on every rank in every microbatch."""
    expected = expected_of(reading)
    actual: dict[Place, Tensor] = {}
    for m, rank in expected.places:
        if judged.stage == "experts" or reading.goes_backward(m):
            actual[m, rank] = _formed(reading, (m, rank), judged)
    worst = {place: compare(value, *judged.target(place), tally, place[1]) for place, value in actual.items()}
    if all(element.holds for element in worst.values()):
        return
    targets = {place: judged.target(place) for place in actual}
    findings, ratio = explain_tokens(
        judged.name,
        actual,
        targets,
        candidates_for(expected, judged.name),
        names=reading.token_ratios,
        dtype=expected.workload.config.dtype,
    )
    fail(judged.error, judged.stage, findings, ratio=ratio, note=early_read(reading, findings))


def _formed(reading: Reading, place: Place, judged: _Judged) -> Tensor:
    """Return a result if it has the right shape; where no result is expected, it may be absent."""
    m, rank = place
    value, expected = judged.actual(reading.seen(m, rank)), judged.target(place).expected
    whose = f"{judged.name} of rank {rank}" + (f" in microbatch {m}" if m else "")
    if value is None:
        routed = int((reading.batches[m][rank].ids_TK >= 0).sum())
        if not (routed if judged.name == "dweights" else expected.numel()):
            return torch.zeros_like(expected)
        error = WrongForm if judged.stage == "experts" else AbsentGradient
        raise error(judged.stage, f"{whose} is None", ranks=(rank,))
    if value.shape != expected.shape:
        shapes = f"{tuple(value.shape)} instead of {tuple(expected.shape)}"
        raise WrongForm(judged.stage, f"{whose} has the shape {shapes}", ranks=(rank,))
    return value


# ---- parameters ----------------------------------------------------------------------------------------------


def judge_expert_gradients(reading: Reading, tally: Tally, *, free: frozenset[int] = frozenset()) -> None:
    """Decide whether every rank ends with the gradients of its experts over the tokens of all ranks.

    It is the sum over all microbatches, divided by dp * cp where the session averages. `judge_idle_expert_gradients`
    decides experts that no token reached; the experts in `free` are not compared. A failure is of the stage "finish" if
    the ranks' gradients before `finish_gradients` add up to the right one, and of the stage "gradient" if not.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: no rank of a pipeline stage names some part of an expert's parameter.
        AbsentGradient: a gradient is None, or some ranks finish none while others do.
        WrongForm, WrongGradient: another shape than the shard's; an element outside its bound.
    """
    held = [gradient for gradient in once(reading, _finished) if not gradient.idle and gradient.key[1] not in free]
    absent = [_absent(gradient, "has no gradient (None)") for gradient in held if gradient.actual is None]
    if absent:
        fail(AbsentGradient, "finish", absent)
    wrong = [gradient for gradient in held if not gradient.holds(tally)]
    if wrong:
        findings, ratio = explain_gradients(gradients_of(expected_of(reading)), held, reading.expert_ratios)
        early = early_read(reading, findings)
        fail(WrongGradient, stage_of(reading, expected_of(reading), wrong), findings, ratio=ratio, note=early)


# The judges of all results of a step with experts.
EXPERT_RESULTS = (judge_expert_outputs, judge_expert_dx, judge_expert_dweights, judge_expert_gradients)


def judge_idle_expert_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether an expert that no token reached ends with a gradient of zeros, not None or old values.

    Counts nothing if every expert was reached.

    Raises:
        NotOffered, Uncovered: as `judge_expert_gradients`.
        AbsentGradient: the gradient is None, or some ranks finish none while others do.
        WrongForm, WrongGradient: another shape than the shard's; an element is not zero.
    """
    held = [gradient for gradient in once(reading, _finished) if gradient.idle]
    why = "received no token and has the gradient None instead of zeros"
    absent = [_absent(gradient, why) for gradient in held if gradient.actual is None]
    if absent:
        fail(AbsentGradient, "finish", absent)
    findings = []
    for gradient in held:
        if not gradient.holds(tally):
            worst = compare(gradient.value, *gradient.target)
            sentence = f"{gradient.name} received no token and has the gradient {worst}"
            findings.append(Finding("leftover", sentence, (gradient.rank,), abs(worst.actual)))
    if findings:
        fail(WrongGradient, "finish", findings)


@judge(WrongGradient, "finish")
def judge_replicas(reading: Reading) -> Comparisons:
    """Decide whether ranks that hold the same part of an expert end with the same gradient, bit for bit.

    Raises:
        NotOffered: gradients are not finished, or every part of every expert is held by one rank only.
        Uncovered, AbsentGradient: as `judge_expert_gradients`; not for a gradient that is None on all replicas.
        WrongGradient: two replicas differ.
    """
    pairs = list(replicas(once(reading, _finished)))
    if not pairs:
        raise NotOffered("the backend has no replicas: every shard of every expert is on one rank")
    for first, other in pairs:
        if (first.actual is None) != (other.actual is None) or not torch.equal(first.value, other.value):
            off = float((first.value.double() - other.value.double()).abs().max())
            sentence = (
                f"ranks {first.rank} and {other.rank} hold replicas of {first.part} and have finished gradients "
                f"that differ by {off:.3g}; expected equal bits"
            )
            yield Finding("replicas", sentence, (first.rank, other.rank), off)
        yield Comparison(other.rank, elements=other.value.numel())


def judge_windows(reading: Reading, tally: Tally) -> None:
    """Decide whether the windows on the experts' parameters are views, disjoint and complete.

    Complete means that on every rank every element of a parameter is in a window, and that in every pipeline stage
    every part of every expert has a window on some rank. Counts the elements of the windows.

    Raises:
        Uncovered: a copy, an overlap, or something without a window.
    """
    _judge_views(reading, tally)
    _require_complete(reading, "experts", [rank.grads_local for rank in reading.ranks])
    expected = expected_of(reading)
    for rank in reading.ranks:
        for (name, expert), grad in rank.grads_local.items():
            assert expert is not None  # otherwise it would have no value
            full = expected.workload.parameters[name, expert]
            tally.add(elements=shard_of(full, grad.shard).numel(), rank=rank.rank)


@judge(Uncovered, "experts")
def _judge_views(reading: Reading) -> Comparisons:
    """Decide whether the windows of every rank are views of the parameters, and disjoint."""
    for rank in reading.ranks:
        for sentence in rank.uncovered:
            yield Finding(sentence.split()[-1], f"rank {rank.rank}: {sentence}", (rank.rank,))


def _finished(reading: Reading) -> list[Held]:
    """Return the finished gradients of every rank with their targets, after checking that all are there."""
    expected = expected_of(reading)
    final = finals_of(reading)
    if require_frozen(reading, {name for name, _ in expected.workload.parameters}):
        raise NotOffered("the backend claims frozen = 'experts': the experts' own weights have no gradient")
    _require_complete(reading, "finish", final)
    found = []
    for rank in reading.ranks:
        stage = expected.stage_of[rank.rank]
        for (name, expert), grad in final[rank.rank].items():
            assert expert is not None  # without named experts the run would have failed in `write`
            full = expected.parameter(stage, (name, expert))
            target = Target(shard_of(full.expected, grad.shard), shard_of(full.allowed, grad.shard))
            idle = expert in expected.idle[stage]
            held = Held(rank.rank, stage, (name, expert), grad.shard, grad.value, target, idle)
            if grad.value is not None and grad.value.shape != target.expected.shape:
                shapes = f"{tuple(grad.value.shape)} instead of {tuple(target.expected.shape)}"
                raise WrongForm("finish", f"the gradient of {held.name} has the shape {shapes}", ranks=(rank.rank,))
            found.append(held)
    return found


def _require_complete(reading: Reading, when: Stage, grads: Sequence[Mapping[ParameterKey, Grad]]) -> None:
    """Raise unless the ranks of every stage together name every part of every expert, all parts equally often.

    An exchange group alone may name fewer, and a rank may name other parts once gradients are finished: a backend may
    shard an expert's parameters over its replicas (ZeRO, FSDP). But then it shards all of them. Of redundant experts
    (`Claims.placement`) every replica is named, that is by every rank which the exchange says holds the expert.
    """
    expected = expected_of(reading)
    redundant, etp = reading.claims.placement == "replicas", reading.outcome.workload.layout.etp
    findings = []
    for at, ranks in enumerate(expected.stages):
        named: dict[ParameterKey, Counter[Shard]] = {key: Counter() for key in expected.workload.parameters}
        for rank in ranks:
            for key, grad in grads[rank].items():
                named[key][grad.shard] += 1
        # Each rank of etp may have the whole output bias, which is added after down.
        usual = max(times for (name, _), parts in named.items() if name != "bias" for times in (*parts.values(), 0))
        where = f" of pipeline stage {at}" if len(expected.stages) > 1 else ""
        for (name, expert), parts in named.items():
            holders = [rank for rank in ranks if expert in reading.ranks[rank].local_experts]
            if what := _incomplete(parts, len(holders) // etp if redundant else usual):
                findings.append(Finding("missing", f"{name} of expert {expert} {what}{where}", ranks))
    if findings:
        fail(Uncovered, when, findings)


def _incomplete(parts: Counter[Shard], usual: int) -> str | None:
    """Return what is missing of a parameter, given how often each of its parts is named, or None."""
    if not parts:
        return "is yielded by 'named' on no rank"
    if not whole(set(parts)):
        return f"is yielded by 'named' in the shards {sorted(shard for shard in parts if shard)} only"
    if min(parts.values()) < usual:
        return f"is yielded by 'named' on {min(parts.values())} of the {usual} ranks that hold a shard of it"
    return None


def _absent(held: Held, what: str) -> Finding:
    return Finding("absent", f"{held.name} {what}", (held.rank,))
