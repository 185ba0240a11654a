"""Runs a case and lets every check judge what came back, each to a verdict and a report of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pytest

from moe_conformance.contract import Limit
from moe_conformance.plugin import repeating
from moe_conformance.plugin.case_items import CaseItem, Check
from moe_conformance.plugin.factors import Factors
from moe_conformance.plugin.foreseeing import foreseen
from moe_conformance.plugin.outcomes import Kept, Outcomes
from moe_conformance.plugin.recording import as_of_a_crash, attach, record_of, translate
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.report.records import EVERY_RANK_FINISHES, FAILING, FOLLOWS
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.reproducing.examining import refusal_by_limit, refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.plan import Case, Cell
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import too_large


@dataclass
class CaseRun:
    """What the items of cases do when they run."""

    run: Run
    outcomes: Outcomes
    # Not in what pytest prints of an interrupted call: these hold all cases.
    checks: dict[str, Sequence[Check]] = field(default_factory=dict, repr=False)  # by id of a case
    followers: dict[str, tuple[Case, ...]] = field(default_factory=dict, repr=False)  # by node id of an item
    imported: set[str] = field(default_factory=set)  # backends whose import was looked at

    @cached_property
    def _factors(self) -> Factors:
        return Factors(self.run, self.outcomes)

    def __call__(self, item: CaseItem) -> None:
        """Let every check judge the case; one that fails keeps none of the others from its verdict."""
        hook = item.ihook
        for check in item.checks:
            about = {"nodeid": check.nodeid, "location": check.location}
            with item.telling(check):
                hook.pytest_runtest_logstart(**about)
            call, report = self._judge(item, check)
            with item.telling(check):
                hook.pytest_runtest_logreport(report=report)
                if report.failed and call.excinfo is not None:
                    hook.pytest_exception_interact(node=check, call=call, report=report)  # --pdb
                hook.pytest_runtest_logfinish(**about)
            _release(call)
            if item.session.shouldfail or item.session.shouldstop:
                return

    def end(self, item: CaseItem) -> None:
        """Let go of an item's case and of those that follow it: pytest keeps all items, and a case has tensors."""
        self.checks.pop(item.case.id, None)
        item.end()
        self.followers.pop(item.nodeid, None)

    def runs(self, case: Case) -> bool:
        """Whether a case is run at all: on enough ranks, within the limits that nobody may break."""
        limit = limit_of(case)
        return not (too_large(case.cell.layout, self.run.options.ranks) or (limit and limit.proof == "undefined"))

    def require_ranks(self, trial: Trial, cell: Cell) -> None:
        """Skip what there are too few ranks for."""
        if reason := too_large(cell.layout, self.run.options.ranks):
            trial.skip("not applicable", f"not applicable: {reason}")

    def step(self, trial: Trial, workload: Workload, deadline_s: float | None = None) -> Outcome:
        """Run a workload now, and count that."""
        trial.runs += 1
        return self.outcomes.step(workload, deadline_s)

    def foreseen(self, case: Case) -> Sequence[Workload]:
        """Return the equivalent runs of a case that its checks will ask for, unless it breaks a limit."""
        if limit_of(case) is not None:
            return ()
        return foreseen(self.run, case.workload, [check.asked for check in self.checks.get(case.id, ())])

    def _beside(self, trial: Trial, kept: Kept, workloads: Sequence[Workload]) -> list[Outcome]:
        """Return what equivalent runs of one world returned, and count them."""
        trial.runs += len(workloads)
        return self.outcomes.beside(kept, workloads)

    def _judge(self, item: CaseItem, check: Check) -> tuple[pytest.CallInfo[None], pytest.TestReport]:
        """Return how a check ended, as pytest has it, with its record."""
        case = item.case
        trial = Trial(check.asked.requirements, check.asked.name, case.cell, case.workload)
        stops = (pytest.exit.Exception, KeyboardInterrupt)
        call = pytest.CallInfo.from_call(partial(self._ask, item, check, trial), when="call", reraise=stops)
        ended = ending(trial, call.excinfo.value if call.excinfo else None)
        ended = as_of_a_crash(ended, item.crashes, elsewhere=_finishing(item) not in (None, check))
        told = ended.message
        if ended.verdict == "error":
            ended = replace(ended, detail=_python_traceback(check, call))
        ended = repeating.looked_again(
            self.run, self.outcomes, check, trial, ended, case, partial(self._ask_again, check, case)
        )
        record = record_of(self.run, check, trial, ended)
        if record.verdict == "fail":
            when = check.asked.mark.kwargs.get("when")
            told_apart = self._factors.told(ended, case, when, partial(self._ask_again, check))
            record = replace(record, message=told_apart.message)
        if ended.crashed and record.requirements == EVERY_RANK_FINISHES:
            item.crashes.add(told)
        report = pytest.TestReport(
            nodeid=check.nodeid,
            location=check.location,
            keywords={},
            outcome="passed",
            longrepr=None,
            when="call",
            duration=call.duration,
            start=call.start,
            stop=call.stop,
        )
        attach(report, record, item.config)
        item.failed |= record.verdict in FAILING and not check.asked.compares_runs
        if item.failed and record.verdict == "fail" and check.asked.compares_runs:
            report.user_properties.append((FOLLOWS, True))
        translate(report, record, self.run)
        return call, report

    def _ask(self, item: CaseItem, check: Check, trial: Trial) -> None:
        """Call a check on what the case returned; skip where nothing ran or the backend refused."""
        case = item.case
        self.require_ranks(trial, case.cell)
        limit = limit_of(case)
        if limit is not None and limit.proof == "undefined":
            trial.skip("limit", f"limit, unproved: {limit.reason}")
        trial.runs += not self.outcomes.holds(case)
        kept = self.outcomes.of(case, self.followers.get(item.nodeid, ()))
        trial.outcome = kept.outcome
        _examine(trial, case)
        twins = partial(self._twins, kept, partial(self._beside, trial, kept), self.imported)
        check.asked.bound()(**_arguments(check, trial, kept, twins))

    def _ask_again(self, check: Check, case: Case, kept: Kept) -> Ending:
        """Return how a check ends on another outcome of its case, on ranks that are still those of that outcome."""
        trial = Trial((), check.name, case.cell, case.workload, outcome=kept.outcome)
        try:
            _examine(trial, case)
            check.asked.bound()(
                **_arguments(check, trial, kept, partial(self._twins, kept, self.outcomes.steps, set()))
            )
        except (Exception, pytest.skip.Exception) as error:
            return ending(trial, error)
        return ending(trial, None)

    def _twins(self, kept: Kept, steps: Callable[[Sequence[Workload]], list[Outcome]], imported: set[str]) -> Twins:
        renew = self.outcomes.renew
        return Twins(self.run.backend, self.run.options.device, steps, renew, kept.alongside, imported)


def _arguments(check: Check, trial: Trial, kept: Kept, twins: Callable[[], Twins]) -> dict[str, Any]:
    """Return what a check asks for by the names of its arguments."""
    offered: dict[str, Callable[[], Any]] = {
        "outcome": lambda: kept.outcome,
        "reading": lambda: kept.reading,
        "tally": lambda: trial.tally,
        "twins": twins,
    }
    return {name: offered[name]() for name in check.asked.arguments}


def _finishing(item: CaseItem) -> Check | None:
    """Return the check of a case that every rank finishes, under which a crash is reported; None if it has none."""
    return next((each for each in item.checks if each.asked.requirements == EVERY_RANK_FINISHES), None)


def limit_of(case: Case) -> Limit | None:
    """Return the first declared limit that a case breaks."""
    return broken(case.cell.limits, case.workload, case.cell.device)


def _examine(trial: Trial, case: Case) -> None:
    """End the check where the outcome alone decides it: the backend refused, or should have."""
    assert trial.outcome is not None
    if refusal := refusal_of(trial.outcome) or refusal_by_limit(case, trial.outcome):
        trial.skip(*refusal)


def _python_traceback(check: Check, call: pytest.CallInfo[None]) -> str:
    """Return where an exception of the suite's own came from, from the check on."""
    assert call.excinfo is not None
    style = check.config.getoption("tbstyle", "auto")
    shown = call.excinfo.getrepr(
        style="long" if style == "auto" else style,
        tbfilter=lambda excinfo: excinfo.traceback.cut(path=check.path).filter(excinfo),
    )
    return str(shown)


def _release(call: pytest.CallInfo[None]) -> None:
    """Empty the frames of an exception: they hold the outcome, and each other until garbage is collected."""
    if call.excinfo is not None:
        traceback.clear_frames(call.excinfo.tb)
        call.excinfo = None
