"""The trial of one item: what its fixtures recorded, and the verdict that follows from how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis.errors import FlakyFailure, Unsatisfiable

from moe_conformance.engine import EngineError
from moe_conformance.engine.infrastructure import classify
from moe_conformance.judging.verdict import FalseLimit, Indecisive, Mismatch, NotOffered, RunFailed, Tally
from moe_conformance.plugin.evidence import evidence
from moe_conformance.report.records import Verdict
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.waiving import Fault
from moe_conformance.workloads.drawn.example import describe
from moe_conformance.workloads.plan import Cell
from moe_conformance.workloads.records.workload import Workload

_UNSTABLE = "unstable: a drawn batch failed and, run again, did not:"


@dataclass
class Trial:
    """What is recorded while an item runs."""

    requirements: tuple[str, ...]
    check: str
    cell: Cell | None = None
    workload: Workload | None = None
    outcome: Outcome | None = None  # the latest
    tally: Tally = field(default_factory=Tally)
    runs: int = 0
    settled: Verdict | None = None  # by a fixture, before the check ran or while it draws
    rejected: str = ""  # why the latest draw was refused
    drawn: dict[str, int] = field(default_factory=dict)  # batches, and how many had each feature that is required
    refused: set[str] = field(default_factory=set)  # features of draws that were refused
    judge: Callable[[Outcome], None] | None = None  # of what is drawn

    def skip(self, verdict: Verdict, reason: str) -> None:
        """End the item with a verdict that is neither pass nor failure."""
        self.settled = verdict
        pytest.skip(reason)


def trial_of(item: pytest.Item) -> Trial:
    """Return the trial of an item; a new one at first."""
    if _TRIAL not in item.stash:
        check, requirements = check_and_requirements(item)
        item.stash[_TRIAL] = Trial(requirements, check)
    return item.stash[_TRIAL]


def check_and_requirements(item: pytest.Item) -> tuple[str, tuple[str, ...]]:
    """Return the name of the check that an item runs, and the requirements that it decides."""
    mark = item.get_closest_marker("requirement")
    return getattr(item, "originalname", None) or item.name, () if mark is None else tuple(mark.args)


def forget(item: pytest.Item) -> None:
    """Delete the trial of an item that has ended."""
    if _TRIAL in item.stash:
        del item.stash[_TRIAL]


_TRIAL = pytest.StashKey[Trial]()


@dataclass(frozen=True)
class Ending:
    """The verdict of an item that ended, with its message and what caused it."""

    verdict: Verdict
    message: str = ""
    kind: str | None = None
    stage: str | None = None
    blamed: tuple[int, ...] = ()
    detail: str = ""
    violated: tuple[str, ...] = ()  # of several requirements those that the mismatch names
    failed: tuple[Mismatch, ...] = ()  # of drawn workloads, each with the outcome of its smallest
    faults: tuple[Fault, ...] = ()  # what a waiver is compared with
    ratio: float | None = None  # the one factor by which all elements are off
    crashed: bool = False  # a rank of the case did not finish: no check of it has anything to judge
    of_case: bool = False  # it is a fault of the whole case, by which all of its checks end: a crash, or a false limit


def ending(trial: Trial, error: BaseException | None) -> Ending:
    """Return how the item ended, given the exception that ended it."""
    if error is None:
        if trial.tally.vacuous:
            return Ending("vacuous", "vacuous: the check compared nothing", "Vacuous")
        return Ending("pass")
    if isinstance(error, pytest.skip.Exception):
        if trial.settled is None:  # by pytest.skip or importorskip in a check: what it was to judge would be missing
            return Ending("error", f"error in the suite: the check skips itself: {error}", "Skipped")
        return Ending(trial.settled, str(error))
    if isinstance(error, Unsatisfiable) and trial.settled:
        return Ending(trial.settled, f"every drawn workload was refused: {trial.rejected}")
    if isinstance(error, Indecisive):
        if trial.outcome is not None and trial.outcome.workload.rotates:
            return Ending("not applicable", f"not applicable: {error}")
        return Ending("vacuous", f"vacuous: the check compared nothing: {error}", "Vacuous")
    if isinstance(error, NotOffered):
        return Ending("not adapted", f"not adapted: {error}")
    parts = list(_parts(error))[::-1]  # Hypothesis raises the smallest last
    mismatches = [part for part in parts if isinstance(part, Mismatch)]
    unstable = [leaf for part in parts if isinstance(part, FlakyFailure) for leaf in part.exceptions]
    mismatches += [leaf for leaf in unstable if isinstance(leaf, Mismatch)]
    for foreign in (*(part for part in parts if not isinstance(part, FlakyFailure)), *unstable):
        if not isinstance(foreign, Mismatch):
            return _not_the_backends(foreign)
    first = mismatches[0]
    outcome = first.outcome or trial.outcome
    if machine := _machines_fault(first, outcome):
        return Ending("infrastructure", f"infrastructure: {machine}", "Infrastructure", first.stage)
    lines = [f"{_UNSTABLE} {mismatch}" if mismatch in unstable else str(mismatch) for mismatch in mismatches]
    verdict = _run_verdict(outcome) if isinstance(first, RunFailed) else "fail"
    crashed = isinstance(first, RunFailed) and not _finished(outcome)
    return Ending(
        verdict="unstable" if first in unstable else verdict,
        message="\n".join(lines),
        kind=type(first).__name__,
        stage=first.stage,
        blamed=first.ranks,
        detail="\n".join([*_drawn(first), *evidence(first, outcome)]),
        violated=_violated(mismatches),
        failed=tuple(mismatch for mismatch in mismatches if mismatch.outcome is not None),
        faults=tuple(fault for mismatch in mismatches for fault in _faults(mismatch, trial)),
        ratio=first.ratio,
        crashed=crashed,
        of_case=crashed or isinstance(first, FalseLimit),
    )


def _not_the_backends(error: BaseException) -> Ending:
    """Return the ending by an exception that is no mismatch: a fault of the machine or of the suite."""
    if isinstance(error, EngineError) and (machine := classify(str(error))):
        return Ending("infrastructure", f"infrastructure: {machine}", "Infrastructure", "run")
    return Ending("error", f"error in the suite: {type(error).__name__}: {error}", type(error).__name__)


def _machines_fault(mismatch: Mismatch, outcome: Outcome | None) -> str | None:
    """Return the fault of the machine for which a run did not finish, with its rank; None if there is none."""
    if not isinstance(mismatch, RunFailed):
        return None
    if outcome is None or not outcome.blamed:
        return classify(mismatch.sentence)
    excused: list[str] = []
    for rank in outcome.blamed:
        reason = classify("\n".join(text for text in (rank.error, rank.traceback, rank.output) if text))
        if reason:
            excused.append(f"rank {rank.rank}: {reason}")
        elif rank.status != "hung":  # a fault of the backend in addition to that of the machine
            return None
    return excused[0] if excused else None


def _parts(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group: Hypothesis raises one when it finds several faults.

    A FlakyFailure, of a fault that did not occur again, is yielded as it is.
    """
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, FlakyFailure):
        for part in error.exceptions:
            yield from _parts(part)
    else:
        yield error


def _violated(mismatches: list[Mismatch]) -> tuple[str, ...]:
    """Return the requirements that the mismatches name.

    A check of several requirements that knows which one a judgement decides sets `requirement` on the mismatch: then
    that one fails, and not all of them.
    """
    named = [getattr(mismatch, "requirement", None) for mismatch in mismatches]
    return tuple(sorted({requirement for requirement in named if requirement})) if all(named) else ()


def _faults(mismatch: Mismatch, trial: Trial) -> Iterator[Fault]:
    """Yield every finding of a mismatch, those too that its message only counts, each with its own size if it has one.

    Else it is no larger than the error of the whole check: the mismatch of a drawn batch has that, else the tally.
    """
    most = mismatch.size if mismatch.outcome is not None else trial.tally.beyond
    for message, finding in mismatch.every_finding():
        size = most if finding.beyond is None else finding.beyond
        yield Fault(finding.error or type(mismatch).__name__, mismatch.stage, message, size or None)


def further(trial: Trial, error: BaseException | None) -> tuple[Fault, ...]:
    """Return what the judges find that an exception kept from being called; it asks for them, which may take runs."""
    if not isinstance(error, Mismatch):
        return ()
    return tuple(fault for mismatch in error.further() for fault in _faults(mismatch, trial))


def _finished(outcome: Outcome | None) -> bool:
    return outcome is None or all(rank.status in ("ok", "refused") for rank in outcome.ranks)


def _run_verdict(outcome: Outcome | None) -> Verdict:
    hung = outcome is not None and any(rank.status == "hung" for rank in outcome.blamed)
    return "hang" if hung else "crash"


def _drawn(mismatch: Mismatch) -> list[str]:
    """Return the smallest example that Hypothesis found; a pinned workload has a name instead."""
    return [] if mismatch.outcome is None else describe(mismatch.outcome.workload)
