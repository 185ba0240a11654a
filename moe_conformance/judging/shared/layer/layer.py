"""Judges of whole layers: outputs, gradients of tokens and of every parameter, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, within
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.explain.bounded import Found
from moe_conformance.judging.explain.bounded_gradients import Held, explain_gradients, part_name, replicas, stage_of
from moe_conformance.judging.explain.bounded_tokens import explain_tokens
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.finished_gradients import finals_of, require_frozen
from moe_conformance.judging.observed.ledgers import early_read
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, shard_of, whole
from moe_conformance.judging.shared.layer.expected import ROUTED, LayerExpected
from moe_conformance.judging.shared.layer.mistakes import candidates_for, gradients_of, times_of_shared
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Stage,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.workloads.records.schedule import FORWARD_ALONE, executes, operations
from moe_conformance.workloads.records.workload import Workload

SHARED = ("shared_gate", "shared_up", "shared_down", "shared_bias", "shared_score")
EVERY = ("router", *ROUTED, *SHARED)


def expected_of(reading: Reading) -> LayerExpected:
    """Return the oracle's results for a reading, computed once."""
    return once(reading, _expect)


def _expect(reading: Reading) -> LayerExpected:
    return LayerExpected.of(reading)


# ---- tokens --------------------------------------------------------------------------------------------------


def judge_layer_outputs(reading: Reading, tally: Tally) -> None:
    """Decide whether y is the routed part plus the shared part, in every element within its rounding error.

    Raises:
        WrongForm: y is missing, not (T, D), not in the shape of x or not in its dtype.
        WrongOutput: an element lies outside its bound.
    """
    expected, workload = expected_of(reading), reading.outcome.workload
    actual, targets = {}, {}
    for place in expected.places:
        m, rank = place
        target, seen = expected.y(place), reading.seen(m, rank)
        shape = (*workload.lead_of(len(target.expected)), workload.config.hidden)
        if seen.y is None or seen.y_shape != shape or seen.y_dtype != workload.config.dtype:
            what = f"{seen.y_dtype} {seen.y_shape} instead of {workload.config.dtype} {shape}"
            raise WrongForm("combine", f"y of rank {rank} in microbatch {m} is {what}", ranks=(rank,))
        actual[place], targets[place] = seen.y, target
    if wrong := _wrong_microbatches(actual, targets, tally):
        findings, ratio = _explain(reading, "y", actual, targets)
        note = _without_gradients_note(workload, wrong) + early_read(reading, findings)
        note += _in_float32(reading, lambda narrow: all(within(y, *narrow.y(place)) for place, y in actual.items()))
        fail(WrongOutput, "combine", findings, ratio=ratio, note=note)


def judge_layer_dx(reading: Reading, tally: Tally) -> None:
    """Decide whether dx sums the gradients through experts, shared experts, gate and router, within rounding.

    Raises:
        AbsentGradient: there are tokens, and their gradient is None.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    expected = expected_of(reading)
    actual, targets = {}, {}
    for place in expected.places:
        m, rank = place
        if not reading.goes_backward(m):
            continue
        target, value = expected.dx(place), reading.seen(m, rank).dx_TD.value
        if value is None and not target.expected.numel():
            continue
        whose = f"dx of rank {rank} in microbatch {m}"
        actual[place], targets[place] = _formed(value, target, whose, rank, "gradient"), target
    if _wrong_microbatches(actual, targets, tally):
        findings, ratio = _explain(reading, "dx", actual, targets)
        note = early_read(reading, findings)
        note += _in_float32(reading, lambda narrow: all(within(dx, *narrow.dx(place)) for place, dx in actual.items()))
        fail(WrongGradient, "gradient", findings, ratio=ratio, note=note)


def _in_float32(reading: Reading, holds: Callable[[LayerExpected], bool]) -> str:
    """Return a note with the claim under which a layer of float64 would be right, "" if there is none."""
    if reading.outcome.workload.config.dtype != torch.float64 or reading.claims.dtype is not None:
        return ""
    design = "; a layer whose router computes in float32 by design claims dtype = torch.float32"
    return design if holds(expected_of(reading).computed_in(torch.float32)) else ""


def judge_shared_unrouted(reading: Reading, tally: Tally) -> None:
    """Decide whether the output of the shared experts is not multiplied by a routing scale.

    Counts the elements in which a scaled shared part would be outside its bound.

    Raises:
        WrongForm, WrongOutput: as `judge_layer_outputs`.
    """
    with tally.uncounted() as uncounted:
        judge_layer_outputs(reading, uncounted)
    expected, scale = expected_of(reading), reading.outcome.workload.config.routing.scale
    for times in (scale, 1 / scale):
        for place in expected.places:
            target = expected.y(place)
            other_TD = expected.solve([place], times_of_shared(times)).y_TD
            apart = int(((other_TD - target.expected).abs() > 2 * target.allowed).sum())
            tally.add(elements=apart, rank=place[1])


def judge_lone_bias(reading: Reading, tally: Tally) -> None:
    """Decide whether y of every token is exactly the one output bias, where everything else computes zero.

    Raises:
        WrongOutput: an element is not equal to the bias.
        WrongForm, WrongOutput: as `judge_layer_outputs`.
    """
    with tally.uncounted() as uncounted:
        judge_layer_outputs(reading, uncounted)
    bias_D = reading.outcome.workload.parameters["shared_bias", 0].double()
    findings = []
    for m, rank in expected_of(reading).places:
        y_TD = reading.seen(m, rank).y
        assert y_TD is not None
        wanted_TD = bias_D.expand_as(y_TD)
        worst = compare(y_TD, wanted_TD, torch.zeros_like(wanted_TD), tally, rank)
        if not worst.holds:
            sentence = f"y of rank {rank} is not exactly the output bias of its shared expert: {worst}"
            findings.append(Finding("inexact", sentence, (rank,), worst.size))
    if findings:
        fail(WrongOutput, "combine", findings)


def _wrong_microbatches(actual: Mapping[Place, Tensor], targets: Mapping[Place, Target], tally: Tally) -> set[int]:
    holds = {place: compare(value, *targets[place], tally, place[1]).holds for place, value in actual.items()}
    return {m for (m, _), right in holds.items() if not right}


def _explain(reading: Reading, name: str, actual: Mapping[Place, Tensor], targets: Mapping[Place, Target]) -> Found:
    expected = expected_of(reading)
    return explain_tokens(
        name,
        actual,
        targets,
        candidates_for(expected, name),
        names=reading.token_ratios,
        dtype=expected.workload.config.dtype,
        note=lambda place, token: _kept_words(expected.kept[place][token]),
    )


def _kept_words(kept_K: Tensor) -> str:
    """Return a note with the slots that a token lost, "" if it kept all."""
    if bool(kept_K.all()):
        return ""
    if not bool(kept_K.any()):
        return ", which had all slots dropped,"
    return f", which kept {int(kept_K.sum())} of {len(kept_K)} slots,"


def _without_gradients_note(workload: Workload, wrong: set[int]) -> str:
    """Return a note if all wrong microbatches ran without gradients, while another ran with them."""
    without = {operation.microbatch for operation in operations(workload.schedule) if operation.name in FORWARD_ALONE}
    trained = executes(workload.schedule, "forward")
    return " (only in forwards without gradients)" if wrong <= without and trained else ""


def _formed(value: Tensor | None, target: Target, whose: str, rank: int, stage: Stage) -> Tensor:
    if value is None:
        raise AbsentGradient(stage, f"{whose} is None", ranks=(rank,))
    if value.shape != target.expected.shape:
        shapes = f"{tuple(value.shape)} instead of {tuple(target.expected.shape)}"
        raise WrongForm(stage, f"{whose} has the shape {shapes}", ranks=(rank,))
    return value


# ---- parameters ----------------------------------------------------------------------------------------------


def judge_layer_gradients(reading: Reading, tally: Tally, names: Sequence[str] = EVERY) -> None:
    """Decide whether every rank ends with its parameters' gradients over all tokens of its pipeline stage.

    That of an expert that no token reached is zero, and not None. A failure is of the stage "finish" if the ranks'
    gradients before `finish_gradients` add up to the right one, and of the stage "gradient" if not.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: the ranks of a stage together do not name all of a parameter.
        AbsentGradient: a gradient is None, or some ranks finish none while others do.
        WrongForm, WrongGradient: another shape than the part's; an element outside its bound.
    """
    expected = expected_of(reading)
    held = _held(reading, names)
    for gradient in held:
        _formed(gradient.actual, gradient.target, f"the gradient of {gradient.name}", gradient.rank, "finish")
    wrong = [gradient for gradient in held if not gradient.holds(tally)]
    if wrong:
        findings, ratio = explain_gradients(gradients_of(expected), held, reading.router_ratios)
        fail(WrongGradient, stage_of(reading, expected, wrong), findings, ratio=ratio)


@judge(WrongGradient, "finish")
def judge_layer_replicas(reading: Reading) -> Comparisons:
    """Decide whether ranks that hold the same part of a shared parameter end with the same gradient, bit for bit.

    Counts nothing where every part is held by one rank only.

    Raises:
        NotOffered: gradients are not finished.
        Uncovered: as `judge_layer_gradients`.
        WrongGradient: two replicas differ.
    """
    for first, other in replicas(_held(reading, SHARED)):
        one, another = (torch.zeros(()) if grad is None else grad for grad in (first.actual, other.actual))
        if not torch.equal(one, another):
            where = f"on ranks {first.rank} and {other.rank}"
            sentence = f"the gradient of {first.part} {where} differs; expected equal bits"
            yield Finding("replicas", sentence, (first.rank, other.rank))
        yield Comparison(other.rank, elements=another.numel())


def _held(reading: Reading, names: Sequence[str]) -> list[Held]:
    expected, finals = expected_of(reading), finals_of(reading)
    left = ROUTED if require_frozen(reading, ROUTED) else ()
    keys = [key for key in reading.outcome.workload.parameters if key[0] in names and key[0] not in left]
    found = []
    for at, ranks in enumerate(expected.stages):
        for key in keys:
            grads = {rank: finals[rank][key] for rank in ranks if key in finals[rank]}
            parts = {grad.shard for grad in grads.values()}
            if not whole(parts):
                which = f"only the shards {sorted(map(str, parts))}" if parts else "nothing"
                sentence = f"'named' yields {which} of {part_name(key, None)} on ranks {list(ranks)}"
                raise Uncovered("finish", sentence, ranks=ranks)
            full, idle = expected.parameter(at, key), expected.idle(at, key)
            for rank, grad in grads.items():
                target = Target(*(shard_of(tensor, grad.shard) for tensor in full))
                found.append(Held(rank, at, key, grad.shard, grad.value, target, idle))
    return found
