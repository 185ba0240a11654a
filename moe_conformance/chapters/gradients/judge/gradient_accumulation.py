"""Judges of sums of gradients over microbatches and steps, and of gradients at padding rows, in equivalent runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_conformance.chapters.gradients.workloads.gradients import LARGE, SMALL
from moe_conformance.judging.compare.bounded import compare
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.finished_gradients import steps_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.parameters import allowed_of, assembled, assembled_again, far_off
from moe_conformance.judging.shared.equivalence.runs import Ran, judge_alike, read_twin, those_that_ran
from moe_conformance.judging.verdict import NotOffered, Tally, WrongGradient
from moe_conformance.reference.gradients.accumulation import accumulated
from moe_conformance.workloads import laws
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin


def judge_sum(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether parameters end with the sum of the gradients that each microbatch alone gives.

    The gradients of tokens are those of each microbatch alone.

    Raises:
        NotOffered: some microbatch was not run alone, or the backend finishes no gradients.
        WrongGradient: a sum differs by more than the rounding errors of all runs together.
        As `judge_alike`.
    """
    _require_all(ran)
    judge_alike(reading, ran, tally)
    runs = [read_twin(twin_run) for twin_run in those_that_ran(ran)]
    whole, parts = assembled(reading), [assembled(run) for run in runs]
    findings = list[Finding]()
    for (stage, key), actual in whole.items():
        expected = torch.stack([part[stage, key] for part in parts]).sum(0)
        allowed = sum((allowed_of(run, stage, key) for run in runs), allowed_of(reading, stage, key))
        name, expert = key
        sentence = f"the gradient of {name} of expert {expert} is not the sum over the microbatches, each run alone"
        findings += far_off(reading, stage, (actual, expected, allowed), sentence, tally)
    if findings:
        fail(WrongGradient, "finish", findings)


def judge_steps(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether a step of one microbatch ends with the gradients that this microbatch alone gives.

    The last run takes these steps, and those before it run one microbatch each.

    Raises:
        NotOffered: the backend takes no second step, or finishes no gradients.
        AbsentGradient: gradients of the microbatch alone are finished, and those of the step are not.
        WrongGradient: a gradient differs by more than the rounding errors of both.
        As `judge_alike`.
    """
    _require_all(ran)
    *alone, stepped = ran
    judge_alike(reading, [stepped], tally)
    findings = list[Finding]()
    for m, (single, step) in enumerate(zip(map(read_twin, alone), steps_of(read_twin(stepped)), strict=True)):
        expected, found = assembled(single), assembled_again(stepped.twin, step)
        for (stage, key), was in expected.items():
            allowed = 2 * allowed_of(single, stage, key)
            name, expert = key
            sentence = (
                f"in step {m} the gradient of {name} of expert {expert} differs from that of microbatch {m} run alone"
            )
            findings += far_off(reading, stage, (found[stage, key], was, allowed), sentence, tally)
    if findings:
        fail(WrongGradient, "finish", findings, start=f"run {stepped.twin.how}, ")


def large_and_small_alone(workload: Workload) -> list[Twin]:
    """Run a microbatch with large gradients alone, and one with small ones."""
    alone = laws.alone(workload)
    return [alone[0], alone[-1]]


def judge_accumulation(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether gradients are added up over microbatches without being rounded below float32 in between.

    Raises:
        NotOffered: a microbatch was not run alone, or the backend finishes no gradients.
        WrongGradient: a gradient is farther from the sum of what the microbatches give alone; in the words of the
            message, within what sums in the dtype of the parameters may lose, or beyond it.
    """
    _require_all(ran)
    workload = reading.outcome.workload
    whole, (large, small) = assembled(reading), (assembled(read_twin(twin_run)) for twin_run in ran)
    narrow = workload.config.dtype == torch.bfloat16
    tokens = sum(workload.tokens[0])
    findings = list[Finding]()
    for (stage, key), actual in whole.items():
        parts_M = torch.stack([large[stage, key]] * LARGE + [small[stage, key]] * SMALL)
        bound = accumulated(parts_M, ranks=workload.layout.world, tokens=tokens, narrow=narrow)
        within = compare(actual, bound.total, bound.narrow).holds
        name, expert = key
        sentence = (
            f"the gradient of {name} of expert {expert} is not the sum over {len(parts_M)} microbatches"
            f"{'; likely cause: partial sums are rounded below float32' if within else ''}"
        )
        findings += far_off(reading, stage, (actual, bound.total, bound.wide), sentence, tally)
    if findings:
        fail(WrongGradient, "finish", findings)


def _require_all(ran: Sequence[Ran]) -> None:
    """Raise `NotOffered` if an equivalent run was not run."""
    if any(twin_run.outcome is None for twin_run in ran):
        raise NotOffered("; ".join(twin_run.why_not for twin_run in ran if twin_run.outcome is None))


def judge_padding_gradients(reading: Reading, ran: Sequence[Ran], tally: Tally) -> None:
    """Decide whether gradients at padding rows change no result; counts those rows.

    Raises:
        NotOffered: no padding row was delivered to any expert.
        As `judge_alike`.
    """
    with tally.uncounted() as uncounted:
        judge_alike(reading, ran, uncounted)
    rows = 0
    for run in map(read_twin, those_that_ran(ran)):
        for rank in run.ranks:
            padding = sum(seen.exchange.padding_gradients for seen in rank.microbatches)
            tally.add(pairs=padding, rank=rank.rank)
            rows += padding
    if not rows:
        raise NotOffered("no padding row was delivered to an expert")
