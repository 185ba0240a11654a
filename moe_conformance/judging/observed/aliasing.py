"""Judges of the end of a run: every rank finished, and outputs, gradients and process state kept their values."""

from __future__ import annotations

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import ChangedState, RunFailed, WrongGradient, WrongOutput
from moe_conformance.workloads.records.runs import ExchangeStep


@judge(RunFailed, "run")
def judge_finished(reading: Reading) -> Comparisons:
    """Decide whether every rank went through its whole schedule and returned every microbatch.

    Raises:
        RunFailed: a rank raised, hung or died, or came back without one of its microbatches.
    """
    require_finished(reading.outcome)
    due = len(reading.outcome.workload.batches)
    for rank in reading.ranks:
        wrong = f"rank {rank.rank} returned {len(rank.microbatches)} of {due} microbatches"
        yield Comparison(rank.rank, wrong if len(rank.microbatches) != due else "", pairs=due)


@judge(WrongGradient, "gradient")
def judge_kept_gradients(reading: Reading) -> Comparisons:
    """Decide whether gradients hold the bytes that their backward left, after all other microbatches have run.

    Other judges compare the gradients as they were when their backward returned. This one detects a backend that
    returns memory which it continues to use.

    Raises:
        WrongGradient: some bytes differ.
    """
    for rank in reading.outcome.ranks:
        for m, microbatch in enumerate(rank.microbatches):
            for name in microbatch.gradients_changed:
                what = f"the gradient of {name} on rank {rank.rank}, microbatch {m},"
                yield _overwritten(what, rank.rank, "after its backward had returned")
            for grad in (microbatch.dx_TD.value, microbatch.dweights_TK.value):
                yield Comparison(rank.rank, elements=0 if grad is None else grad.numel())


@judge(WrongOutput, "combine")
def judge_kept_outputs(reading: Reading) -> Comparisons:
    """Decide whether y and the rows delivered to experts hold their bytes until their own backward has ended.

    A y without a backward holds them until the schedule has ended. Rows are compared where the suite's experts keep
    them, not where the experts return the tensor that they received.

    Raises:
        WrongOutput: some bytes differ.
    """
    words = {"y": "the output", "rows": "a row delivered to an expert"}
    run = reading.outcome.workload.run
    keeps_rows = not isinstance(run, ExchangeStep) or run.answered == "probe"
    for rank in reading.outcome.ranks:
        for m, microbatch in enumerate(rank.microbatches):
            backward = reading.goes_backward(m)
            when = "before its backward had ended" if backward else "later, and no backward followed"
            for name in microbatch.outputs_changed:
                yield _overwritten(f"{words[name]} of microbatch {m} on rank {rank.rank}", rank.rank, when)
            if microbatch.y is not None:
                kept = microbatch.exchange.handed if keeps_rows and backward else ()
                rows = sum(handed.rows_RD.numel() for handed in kept)
                yield Comparison(rank.rank, elements=microbatch.y.numel() + rows)


@judge(ChangedState, "run")
def judge_state(reading: Reading) -> Comparisons:
    """Decide whether the step left the global state of its process as it was.

    Compared are random generators, default dtype, grad mode, deterministic flags and number of threads, from after
    building, which may draw random numbers, until gradients are finished. The grad mode is also compared at the end of
    every call for which it is switched off.

    Raises:
        ChangedState: something differs after the schedule.
    """
    for rank in reading.outcome.ranks:
        for name in rank.state_changed:
            yield Finding(name, f"rank {rank.rank} changed {name}, and left it so after the step", (rank.rank,))
        yield Comparison(rank.rank, elements=1)


def _overwritten(what: str, rank: int, when: str) -> Finding:
    memory = "it is a view of a buffer that the backend reuses"
    return Finding("overwritten", f"{what} was overwritten {when}; likely cause: {memory}", (rank,))
