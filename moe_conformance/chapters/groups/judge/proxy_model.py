"""Judges of the proxy model, divided over ranks and pipeline stages, compared with the model on one device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.chapters.groups.workloads.proxy_model import sequences, solved
from moe_conformance.judging.compare.bounded import compare, factor
from moe_conformance.judging.explain.bounded_gradients import part_name
from moe_conformance.judging.findings import Finding, fail, ratio_words
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.finished_gradients import divisor_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import shard_of, whole
from moe_conformance.judging.verdict import (
    AbsentGradient,
    MalformedClaim,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.groups.proxy_model import ModelGradients

WIDE, NARROW = 2.0**-40, 2.0**-16
"""Allowed error of every element, relative to the largest one of its tensor; the model is too deep for a derived bound.

It is asked for in float64, where sums of some thousand addends err by 2^-43. A backend that says that its routers
compute in another dtype (`Claims.dtype`), as some do whatever the tokens are, is held to float32: it errs by 2^-20
in logits of 16, and in every weight by as much. One token less in any expert is 2^-15 in the pinned models, and usually
more."""


class Expected(NamedTuple):
    """The oracle's results for the proxy model, and the bounds."""

    solved: ModelGradients
    divisor: int  # of the backend's gradients: 1 where they are summed, dp * cp where they are averaged
    off: float  # `WIDE` or `NARROW`


def expected_of(reading: Reading) -> Expected:
    """Return the oracle's results for a reading, computed once."""
    return once(reading, _expect)


def _expect(reading: Reading) -> Expected:
    workload = reading.outcome.workload
    wide = all(rank.claims.dtype in (None, workload.config.dtype) for rank in reading.ranks)
    divisor = divisor_of(workload, reading.ranks[0].loss_convention)
    return Expected(solved(workload), divisor, WIDE if wide else NARROW)


def judge_proxy_tokens(reading: Reading, tally: Tally) -> None:
    """Decide whether the last stage returns the outputs of the whole model, and the first its gradients of x.

    Raises:
        WrongForm, AbsentGradient: a tensor is missing or has another shape.
        WrongOutput, WrongGradient: an element is off by more than `Expected.off` of the largest.
        MalformedClaim: routers claim to compute in float32, and every output is as exact as in float64.
    """
    expected, _, off = expected_of(reading)
    outputs: list[Finding] = []
    gradients: list[Finding] = []
    exact = off == NARROW
    for number, (m, first, last) in enumerate(sequences(reading.outcome.workload)):
        for ranks, values, found in ((last, expected.y, outputs), (first, expected.dx, gradients)):
            start = 0
            for rank in ranks:
                T = len(reading.batches[m][rank].x_TD)
                rows, start = values[number][start : start + T], start + T
                seen = reading.seen(m, rank)
                value = seen.y if found is outputs else seen.dx_TD.value
                what = f"{'y' if found is outputs else 'dx'} of rank {rank} in microbatch {m}"
                if value is None or value.shape != rows.shape:
                    error = WrongForm if value is not None or found is outputs else AbsentGradient
                    shape = None if value is None else tuple(value.shape)
                    raise error("run", f"{what} is {shape} instead of {tuple(rows.shape)}", ranks=(rank,))
                found += _wrong(what, rank, value, rows, off * _largest(values[number]), tally)
                exact &= not _wrong(what, rank, value, rows, WIDE * _largest(values[number]), Tally())
    if outputs:
        fail(WrongOutput, "combine", outputs)
    if gradients:
        fail(WrongGradient, "gradient", gradients)
    if exact:
        (dtype,) = {rank.claims.dtype for rank in reading.ranks} - {None, reading.outcome.workload.config.dtype}
        sentence = f"routers claim dtype = {dtype}, and all outputs and gradients are as exact as in float64"
        raise MalformedClaim("run", f"{sentence}; expected no such claim, or errors of that dtype")


def judge_proxy_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether every parameter of every block ends with the gradient of the whole model, in all shards.

    Gradients that the backend does not finish (`RankOutcome.finish_refusal`) are not judged; those of dense parts
    always are.

    Raises:
        AbsentGradient, WrongForm, Uncovered: a gradient is missing or has another shape.
        WrongGradient: an element is off by more than `Expected.off` of the largest.
    """
    expected = expected_of(reading)
    findings: list[Finding] = []
    for b, of_block in enumerate(expected.solved.parameters):
        for (name, number), full in of_block.items():
            key = (f"block{b}/{name}", number)
            finals = {rank.rank: dict(rank.grads_final or {}) for rank in reading.ranks}
            held = [(rank, final[key]) for rank, final in finals.items() if key in final]
            if not held and reading.ranks[0].finish_refusal:
                continue
            if not held or not whole(grad.shard for _, grad in held):
                sentence = f"'named' yields not all shards of {part_name(key, None)} on all ranks together"
                raise Uncovered("finish", sentence)
            divisor = 1 if name.startswith("mix") else expected.divisor
            for rank, grad in held:
                what = f"the gradient of {part_name(key, grad.shard)} on rank {rank}"
                target = shard_of(full, grad.shard) / divisor
                if grad.value is None:
                    raise AbsentGradient("finish", f"{what} is None", ranks=(rank,))
                if grad.value.shape != target.shape:
                    shapes = f"{tuple(grad.value.shape)} instead of {tuple(target.shape)}"
                    raise WrongForm("finish", f"{what} has the shape {shapes}", ranks=(rank,))
                findings += _wrong(what, rank, grad.value, target, expected.off * _largest(full) / divisor, tally)
    if findings:
        fail(WrongGradient, "finish", findings)


def _largest(full: Tensor) -> float:
    return float(full.abs().max()) if full.numel() else 0.0


def _wrong(what: str, rank: int, value: Tensor, target: Tensor, allowed: float, tally: Tally) -> list[Finding]:
    bound = torch.full_like(target, allowed)
    worst = compare(value, target, bound, tally, rank)
    if worst.holds:
        return []
    ratio = factor(value, target, bound, {})
    said = str(worst) if ratio is None else ratio_words(ratio, {})
    return [Finding("off" if ratio is None else "factor", f"{what} is {said}", (rank,), worst.size)]
