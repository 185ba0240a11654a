"""Judges of memory that must keep its values after it was returned: outputs, gradients and process state."""

from __future__ import annotations

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import ChangedState, Tally, WrongGradient, WrongOutput
from moe_conformance.workloads.records.runs import ExchangeStep


def judge_kept_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether gradients hold the bytes that their backward left, after all other microbatches have run.

    Other judges compare the gradients as they were when their backward returned. This one detects a backend that
    returns memory which it continues to use.

    Raises:
        WrongGradient: some bytes differ.
    """
    findings = []
    for rank in reading.outcome.ranks:
        for m, microbatch in enumerate(rank.microbatches):
            for name in microbatch.gradients_changed:
                what = f"the gradient of {name} on rank {rank.rank}, microbatch {m},"
                findings.append(_overwritten(what, rank.rank, "after its backward had returned"))
    if findings:
        fail(WrongGradient, "gradient", findings)
    for rank in reading.outcome.ranks:
        for microbatch in rank.microbatches:
            for grad in (microbatch.dx_TD.value, microbatch.dweights_TK.value):
                tally.add(elements=0 if grad is None else grad.numel(), rank=rank.rank)


def judge_kept_outputs(reading: Reading, tally: Tally) -> None:
    """Decide whether y and the rows delivered to experts hold their bytes until their own backward has ended.

    A y without a backward holds them until the schedule has ended. Rows are compared where the suite's experts keep
    them, not where the experts return the tensor that they received.

    Raises:
        WrongOutput: some bytes differ.
    """
    said = {"y": "the output", "rows": "a row delivered to an expert"}
    findings = []
    for rank in reading.outcome.ranks:
        for m, microbatch in enumerate(rank.microbatches):
            backward = reading.goes_backward(m)
            when = "before its backward had ended" if backward else "later, and no backward followed"
            for name in microbatch.outputs_changed:
                what = f"{said[name]} of microbatch {m} on rank {rank.rank}"
                findings.append(_overwritten(what, rank.rank, when))
    if findings:
        fail(WrongOutput, "combine", findings)
    run = reading.outcome.workload.run
    keeps_rows = not isinstance(run, ExchangeStep) or run.answered == "probe"
    for rank in reading.outcome.ranks:
        for m, microbatch in enumerate(rank.microbatches):
            if microbatch.y is None:
                continue
            kept = microbatch.exchange.handed if keeps_rows and reading.goes_backward(m) else ()
            rows = sum(handed.rows_RD.numel() for handed in kept)
            tally.add(elements=microbatch.y.numel() + rows, rank=rank.rank)


def judge_state(reading: Reading, tally: Tally) -> None:
    """Decide whether the step left the global state of its process as it was.

    Compared are random generators, default dtype, grad mode, deterministic flags and number of threads, from after
    building, which may draw random numbers, until gradients are finished. The grad mode is also compared at the end of
    every call for which it is switched off.

    Raises:
        ChangedState: something differs after the schedule.
    """
    findings = [
        Finding(name, f"rank {rank.rank} changed {name}, and left it so after the step", (rank.rank,))
        for rank in reading.outcome.ranks
        for name in rank.state_changed
    ]
    if findings:
        fail(ChangedState, "run", findings)
    for rank in reading.outcome.ranks:
        tally.add(elements=1, rank=rank.rank)


def _overwritten(what: str, rank: int, when: str) -> Finding:
    memory = "it is a view of a buffer that the backend reuses"
    return Finding("overwritten", f"{what} was overwritten {when}; likely cause: {memory}", (rank,))
