"""One item on trial: what its fixtures found, and the verdict that follows from how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis.errors import FlakyFailure, Unsatisfiable

from moe_conformance.engine import EngineError
from moe_conformance.engine.infrastructure import classify
from moe_conformance.judging.verdict import Mismatch, NotOffered, RunFailed, Tally
from moe_conformance.plan import Cell
from moe_conformance.report.records import Verdict
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import Workload

_TRACEBACK_LINES = 10


@dataclass
class Trial:
    """Filled in while the item runs."""

    requirements: tuple[str, ...]
    check: str
    cell: Cell | None = None
    workload: Workload | None = None
    outcome: Outcome | None = None  # the latest
    tally: Tally = field(default_factory=Tally)
    runs: int = 0
    settled: Verdict | None = None  # by a fixture, before the check ran or while it draws
    rejected: str = ""  # why the latest draw was refused

    def skip(self, verdict: Verdict, reason: str) -> None:
        """End the item here with a verdict that is neither pass nor failure."""
        self.settled = verdict
        pytest.skip(reason)


def trial_of(item: pytest.Item) -> Trial:
    """Return what is known of an item so far."""
    if _TRIAL not in item.stash:
        mark = item.get_closest_marker("requirement")
        requirements = () if mark is None else tuple(mark.args)
        item.stash[_TRIAL] = Trial(requirements, getattr(item, "originalname", None) or item.name)
    return item.stash[_TRIAL]


_TRIAL = pytest.StashKey[Trial]()


@dataclass(frozen=True)
class Ending:
    """How an item ended, in words."""

    verdict: Verdict
    message: str = ""
    kind: str | None = None
    stage: str | None = None
    blamed: tuple[int, ...] = ()
    detail: str = ""
    violated: tuple[str, ...] = ()  # which of several requirements, where the mismatch says so


def ending(trial: Trial, error: BaseException | None) -> Ending:
    """Return how the item ended, given the exception that ended it."""
    if error is None:
        if trial.tally.vacuous:
            return Ending(
                "vacuous", "vacuous: the check ended without a single comparison, so it shows nothing", "Vacuous"
            )
        return Ending("pass")
    if isinstance(error, pytest.skip.Exception):
        return Ending(trial.settled or "not run", str(error))
    if isinstance(error, Unsatisfiable) and trial.settled:
        return Ending(trial.settled, f"every workload that was drawn was refused: {trial.rejected}")
    if isinstance(error, FlakyFailure):
        told = "; ".join(str(leaf) for leaf in _leaves(error) if isinstance(leaf, Mismatch)) or str(error)
        message = f"unstable: what was drawn failed, and did not fail when it ran once more: {told}"
        return Ending("unstable", message, "Flaky", detail="\n".join(_drawn(trial)))
    if isinstance(error, NotOffered):
        return Ending("not adapted", f"not adapted: {error}")
    leaves = list(_leaves(error))
    mismatches = [leaf for leaf in leaves if isinstance(leaf, Mismatch)]
    if not mismatches or len(mismatches) < len(leaves):
        foreign = next(leaf for leaf in leaves if not isinstance(leaf, Mismatch))
        if isinstance(foreign, EngineError) and (machine := classify(str(foreign))):
            return Ending("infrastructure", f"infrastructure: {machine}", "Infrastructure", "run")
        return Ending("error", f"the suite's own {type(foreign).__name__}: {foreign}", type(foreign).__name__)
    first = mismatches[0]
    if machine := _machines_fault(first, trial.outcome):
        return Ending("infrastructure", f"infrastructure: {machine}", "Infrastructure", first.stage)
    return Ending(
        verdict=_run_verdict(trial.outcome) if isinstance(first, RunFailed) else "fail",
        message="\n".join(str(mismatch) for mismatch in mismatches),
        kind=type(first).__name__,
        stage=first.stage,
        blamed=first.ranks,
        detail="\n".join([*_drawn(trial), *_traceback(first, trial.outcome)]),
        violated=_violated(mismatches),
    )


def _machines_fault(mismatch: Mismatch, outcome: Outcome | None) -> str | None:
    """Return what was wrong with the machine where a run did not finish for that, with the rank that met it."""
    if not isinstance(mismatch, RunFailed):
        return None
    if outcome is None or not outcome.blamed:
        return classify(mismatch.sentence)
    excused: list[str] = []
    for rank in outcome.blamed:
        reason = classify("\n".join(text for text in (rank.error, rank.traceback, rank.output) if text))
        if reason:
            excused.append(f"rank {rank.rank}: {reason}")
        elif rank.status != "hung":  # a fault of its own beside the machine's
            return None
    return excused[0] if excused else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group: Hypothesis raises one when it finds several faults."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _violated(mismatches: list[Mismatch]) -> tuple[str, ...]:
    """Return the requirements that the mismatches name.

    A check of several requirements that knows which one a judgement decides sets `requirement` on the mismatch: then
    that one fails, and not all of them.
    """
    named = [getattr(mismatch, "requirement", None) for mismatch in mismatches]
    return tuple(sorted({each for each in named if each})) if all(named) else ()


def _run_verdict(outcome: Outcome | None) -> Verdict:
    hung = outcome is not None and any(rank.status == "hung" for rank in outcome.blamed)
    return "hang" if hung else "crash"


def _traceback(mismatch: Mismatch, outcome: Outcome | None) -> list[str]:
    """Return the end of the traceback of the first blamed rank; a mismatch of values needs none."""
    if not isinstance(mismatch, RunFailed) or outcome is None:
        return []
    rank = next((rank for rank in outcome.blamed if rank.traceback), None)
    if rank is None or rank.traceback is None:
        return []
    lines = rank.traceback.rstrip().splitlines()
    cut = ["..."] if len(lines) > _TRACEBACK_LINES else []
    return [f"on rank {rank.rank}:", *(f"  {line}" for line in cut + lines[-_TRACEBACK_LINES:])]


def _drawn(trial: Trial) -> list[str]:
    """Return what Hypothesis drew last, which is its smallest example; a pinned workload has a name instead."""
    if trial.workload is not None or trial.outcome is None:
        return []
    workload = trial.outcome.workload
    config = workload.config
    dtype = str(config.dtype).removeprefix("torch.")
    lines = [
        f"drawn: E = {config.experts}, K = {config.top_k}, D = {config.hidden}, {dtype}, schedule {workload.schedule}"
    ]
    for m, batches in enumerate(workload.batches):
        for rank, batch in enumerate(batches):
            lines.append(f"  microbatch {m}, rank {rank}: ids {batch.ids_TK.tolist()}")
    return lines
