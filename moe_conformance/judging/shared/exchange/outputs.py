"""Judges of outputs: the shape, dtype and every element of y, and unchanged inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.explain.block_view import Sheets
from moe_conformance.judging.explain.blocks import explain
from moe_conformance.judging.explain.microbatch_mixup import flight_words
from moe_conformance.judging.findings import Finding, count, fail
from moe_conformance.judging.observed.ledgers import early_read
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.last_correct_stage import before_experts
from moe_conformance.judging.shared.exchange.overflow import must_be_finite
from moe_conformance.judging.verdict import ChangedInput, Stage, Tally, WrongForm, WrongOutput


def judge_form(reading: Reading, tally: Tally) -> None:
    """Decide whether y has the shape and dtype of x, and is finite wherever no intermediate sum can overflow.

    Raises:
        WrongForm: another shape or dtype.
        WrongOutput: the shape and dtype are right, and NaN or infinity is where the sum of all magnitudes fits the
            dtype.
    """
    if findings := list(_misshapen(reading)):
        fail(WrongForm, "combine", findings)
    _judge_finite(reading, tally)


@judge(WrongOutput, "combine")
def _judge_finite(reading: Reading) -> Comparisons:
    for rank, m, y in _outputs(reading):
        yield Comparison(rank, elements=y.numel())
        if bool(torch.isfinite(y).all()):
            continue
        if bad := (~torch.isfinite(y) & must_be_finite(reading, (m, rank))).any(1).nonzero().flatten().tolist():
            sentence = (
                f"y of rank {rank} is not finite at {count(len(bad), 'token')}, although its terms fit "
                f"{reading.outcome.workload.config.dtype}; the first is token {bad[0]} of microbatch {m}"
            )
            yield Finding("not finite", sentence, (rank,), len(bad))


def judge_outputs(reading: Reading, tally: Tally) -> None:
    """Decide whether every element of y exactly equals the expected value; a token without a slot has zeros.

    Raises:
        WrongForm: y has another shape, so that its elements cannot be compared.
        WrongOutput: an element differs.
    """
    findings = [finding for finding in _misshapen(reading) if finding.kind == "shape"]
    if findings:
        fail(WrongForm, "combine", findings)
    microbatches = range(len(reading.batches))
    actual: dict[int, list[torch.Tensor]] = {m: [] for m in microbatches}
    for _, m, y in _outputs(reading):
        actual[m].append(y)
    sheets = Sheets(
        reading=reading,
        name="y",
        noun="answer",
        unit="row",
        units={m: [batch.x_TD.double() for batch in reading.batches[m]] for m in microbatches},
        actual=actual,
        expected={m: reading.expected.y[m] for m in microbatches},
    )
    findings, ratio = explain(sheets)
    if findings:
        before = before_experts(reading)
        stage: Stage = "dispatch" if before else "combine"
        start, note = flight_words(reading, sheets.wrong_microbatches())
        early = early_read(reading, findings)
        fail(
            WrongOutput,
            stage,
            findings,
            ratio=ratio,
            start=start,
            note=(f"; {before}" if before else "") + note + early,
        )
    for rank, _, y in _outputs(reading):
        tally.add(elements=y.numel(), rank=rank)


@judge(ChangedInput, "run")
def judge_inputs(reading: Reading) -> Comparisons:
    """Decide whether x, ids, weights and the upstream gradient still hold the bytes that the backend received.

    Raises:
        ChangedInput: one of them was changed.
    """
    for rank in reading.ranks:
        for m, seen in enumerate(rank.microbatches):
            for name in seen.inputs_changed:
                sentence = f"the backend changed its input {name} on rank {rank.rank} in microbatch {m}"
                yield Finding(name, sentence, (rank.rank,))
    for ranks in reading.batches:
        for number, batch in enumerate(ranks):
            inputs = (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream)
            yield Comparison(number, elements=sum(tensor.numel() for tensor in inputs))


def _outputs(reading: Reading) -> list[tuple[int, int, torch.Tensor]]:
    """Return (rank, microbatch, y) for every rank and microbatch."""
    return [
        (rank.rank, m, seen.y)
        for rank in reading.ranks
        for m, seen in enumerate(rank.microbatches)
        if seen.y is not None
    ]


def _misshapen(reading: Reading) -> Iterator[Finding]:
    workload = reading.outcome.workload
    for rank in reading.ranks:
        for m, seen in enumerate(rank.microbatches):
            T, D = workload.batches[m][rank.rank].x_TD.shape
            shape = (*workload.lead_of(T), D)
            whose = f"y of rank {rank.rank} in microbatch {m}"
            if seen.y is None:
                yield Finding("shape", f"{whose} is None", (rank.rank,))
            elif seen.y_shape != shape or seen.y.shape != (T, D):
                sentence = f"{whose} has the shape {tuple(seen.y_shape)} instead of {shape}, the shape of x"
                yield Finding("shape", sentence, (rank.rank,))
            elif seen.y_dtype != workload.config.dtype:
                sentence = f"{whose} has the dtype {seen.y_dtype} instead of {workload.config.dtype}, the dtype of x"
                if seen.y_dtype == torch.promote_types(workload.config.dtype, torch.float32):
                    sentence += "; likely cause: routing weights are float32, and so is their product with a row"
                yield Finding("dtype", sentence, (rank.rank,))
