"""Runs a case and calls every check on its outcome: one verdict and one report per check."""

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
from moe_conformance.plugin.recording import (
    as_of_its_case,
    attach,
    excused,
    record_of,
    translate,
)
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending, Trial, ending, further
from moe_conformance.report.records import EVERY_RANK_FINISHES, FAILING, FOLLOWS
from moe_conformance.report.unjudged import BY_DESIGN
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.reproducing.examining import refusal_by_limit, refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.plan import Case, Cell
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import too_large


@dataclass
class CaseRun:
    """Runs the items of cases."""

    run: Run
    outcomes: Outcomes
    # Not in what pytest prints of an interrupted call: these hold all cases.
    checks: dict[str, Sequence[Check]] = field(default_factory=dict, repr=False)  # by id of a case
    followers: dict[str, tuple[Case, ...]] = field(default_factory=dict, repr=False)  # by node id of an item
    imported: set[str] = field(default_factory=set)  # backends whose import was checked

    @cached_property
    def _factors(self) -> Factors:
        return Factors(self.run, self.outcomes)

    def __call__(self, item: CaseItem) -> None:
        """Call every check of the case, whether or not another has failed."""
        hook = item.ihook
        for check in item.checks:
            names = {"nodeid": check.nodeid, "location": check.location}
            with item.reporting(check):
                hook.pytest_runtest_logstart(**names)
            call, report = self._judge(item, check)
            with item.reporting(check):
                hook.pytest_runtest_logreport(report=report)
                if report.failed and call.excinfo is not None:
                    hook.pytest_exception_interact(node=check, call=call, report=report)  # --pdb
                hook.pytest_runtest_logfinish(**names)
            _release(call)
            if item.session.shouldfail or item.session.shouldstop:
                return

    def end(self, item: CaseItem) -> None:
        """Release an item's case and those that follow it: pytest keeps all items, and a case has tensors."""
        self.checks.pop(item.case.id, None)
        item.end()
        self.followers.pop(item.nodeid, None)

    def runs(self, case: Case) -> bool:
        """Whether a case is run: there are enough ranks, and it breaks no limit beyond which nothing is tried."""
        limit = limit_of(case)
        return not (too_large(case.cell.layout, self.run.options.ranks) or (limit and limit.proof != "refused"))

    def require_ranks(self, trial: Trial, cell: Cell) -> None:
        """Skip the item if its layout needs more ranks than there are."""
        if reason := too_large(cell.layout, self.run.options.ranks):
            trial.skip("not applicable", f"not applicable: {reason}")

    def step(self, trial: Trial, workload: Workload, deadline_s: float | None = None) -> Outcome:
        """Run a workload now, and count the run."""
        trial.runs += 1
        return self.outcomes.step(workload, deadline_s)

    def foreseen(self, case: Case) -> Sequence[Workload]:
        """Return the equivalent runs of a case that its checks will request; none if it breaks a limit."""
        if limit_of(case) is not None:
            return ()
        return foreseen(self.run, case.workload, [check.definition for check in self.checks.get(case.id, ())])

    def _equivalent_runs(self, trial: Trial, kept: Kept, workloads: Sequence[Workload]) -> list[Outcome]:
        """Return the outcomes of equivalent runs of one world, and count them."""
        trial.runs += len(workloads)
        return self.outcomes.equivalent_runs(kept, workloads)

    def _judge(self, item: CaseItem, check: Check) -> tuple[pytest.CallInfo[None], pytest.TestReport]:
        """Call a check; return pytest's call and its report, with the record attached."""
        case = item.case
        trial = Trial(check.definition.requirements, check.definition.name, case.cell, case.workload)
        stops = (pytest.exit.Exception, KeyboardInterrupt)
        call = pytest.CallInfo.from_call(partial(self._call, item, check, trial), when="call", reraise=stops)
        ended = ending(trial, call.excinfo.value if call.excinfo else None)
        ended = as_of_its_case(ended, item.faults, elsewhere=_finishing(item) not in (None, check))
        message = ended.message
        if ended.verdict == "error":
            ended = replace(ended, detail=_python_traceback(check, call))
        if call.excinfo is not None and excused(self.run, check, trial, ended):
            ended = replace(ended, faults=(*ended.faults, *further(trial, call.excinfo.value)))
        ended = repeating.looked_again(
            self.run, self.outcomes, check, trial, ended, case, partial(self._call_again, check, case)
        )
        record = record_of(self.run, check, trial, ended, item.checks)
        if record.verdict == "fail" and not ended.of_case:
            when = check.definition.mark.kwargs.get("when")
            ended_with_size = self._factors.with_size(ended, case, when, partial(self._call_again, check))
            record = replace(record, message=ended_with_size.message)
        if ended.of_case and record.verdict in FAILING:
            item.faults.add(message)
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
        item.failed |= record.verdict in FAILING and not check.definition.compares_runs
        if item.failed and record.verdict == "fail" and check.definition.compares_runs:
            report.user_properties.append((FOLLOWS, True))
        translate(report, record, self.run)
        return call, report

    def _call(self, item: CaseItem, check: Check, trial: Trial) -> None:
        """Call a check on the outcome of the case; skip where nothing ran or the backend refused."""
        case = item.case
        self.require_ranks(trial, case.cell)
        limit = limit_of(case)
        if limit is not None and limit.proof == "undefined":
            trial.skip("limit", f"limit, unproved: {limit.reason}")
        if limit is not None and limit.proof == "design":
            trial.skip("not applicable", f"{BY_DESIGN}: {limit.reason}")
        trial.runs += not self.outcomes.holds(case)
        kept = self.outcomes.of(case, self.followers.get(item.nodeid, ()))
        trial.outcome = kept.outcome
        _examine(trial, case)
        twins = partial(self._twins, kept, partial(self._equivalent_runs, trial, kept), self.imported)
        check.definition.bound()(**_arguments(check, trial, kept, twins))

    def _call_again(self, check: Check, case: Case, kept: Kept) -> Ending:
        """Return how a check ends on another outcome of its case; the ranks of that outcome still run."""
        trial = Trial((), check.name, case.cell, case.workload, outcome=kept.outcome)
        try:
            _examine(trial, case)
            check.definition.bound()(
                **_arguments(check, trial, kept, partial(self._twins, kept, self.outcomes.steps, set()))
            )
        except (Exception, pytest.skip.Exception) as error:
            return ending(trial, error)
        return ending(trial, None)

    def _twins(self, kept: Kept, steps: Callable[[Sequence[Workload]], list[Outcome]], imported: set[str]) -> Twins:
        renew = self.outcomes.renew
        return Twins(self.run.backend, self.run.options.device, steps, renew, kept.alongside, imported)


def _arguments(check: Check, trial: Trial, kept: Kept, twins: Callable[[], Twins]) -> dict[str, Any]:
    """Return the arguments of a check by name."""
    offered: dict[str, Callable[[], Any]] = {
        "outcome": lambda: kept.outcome,
        "reading": lambda: kept.reading,
        "tally": lambda: trial.tally,
        "twins": twins,
    }
    return {name: offered[name]() for name in check.definition.arguments}


def _finishing(item: CaseItem) -> Check | None:
    """Return the check that every rank of the case finishes, under which a crash is reported; None without one."""
    return next((check for check in item.checks if check.definition.requirements == EVERY_RANK_FINISHES), None)


def limit_of(case: Case) -> Limit | None:
    """Return the first declared limit that a case breaks."""
    return broken(case.cell.limits, case.workload, case.cell.device)


def _examine(trial: Trial, case: Case) -> None:
    """End the check where the outcome alone decides it: the backend refused, or should have."""
    assert trial.outcome is not None
    if refusal := refusal_of(trial.outcome) or refusal_by_limit(case, trial.outcome):
        trial.skip(*refusal)


def _python_traceback(check: Check, call: pytest.CallInfo[None]) -> str:
    """Return the traceback of an exception of the suite, from the check on."""
    assert call.excinfo is not None
    style = check.config.getoption("tbstyle", "auto")
    shown = call.excinfo.getrepr(
        style="long" if style == "auto" else style,
        tbfilter=lambda excinfo: excinfo.traceback.cut(path=check.path).filter(excinfo),
    )
    return str(shown)


def _release(call: pytest.CallInfo[None]) -> None:
    """Clear the frames of an exception: they hold the outcome until garbage is collected."""
    if call.excinfo is not None:
        traceback.clear_frames(call.excinfo.tb)
        call.excinfo = None
