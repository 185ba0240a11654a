"""The driver: gives checks their cases, runs each case once on the ranks, and makes a record of every item's end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import torch

from moe_conformance.contract import Limit
from moe_conformance.engine import Engine, EngineError
from moe_conformance.judging import reading as judging
from moe_conformance.judging.verdict import Mismatch, RunFailed, Tally
from moe_conformance.plan import Case, Cell, Plan, too_large
from moe_conformance.plugin.run import Run, engine_needs
from moe_conformance.plugin.trial import Ending, Trial, ending
from moe_conformance.report.records import FAILING, PROPERTY, Record, Verdict
from moe_conformance.report.words import failure
from moe_conformance.scenarios.group_lists import CannotTell, group_lists
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.topology import Layout, RankLists, layouts
from moe_conformance.waivers import Item
from moe_conformance.workloads.features import broken
from moe_conformance.workloads.records import Workload

_USAGE_ERROR = int(pytest.ExitCode.USAGE_ERROR)
TRIAL = pytest.StashKey[Trial]()

Drive = Callable[[Workload], Outcome]


@dataclass
class _Kept:
    """The outcome of the latest case, and its reading once somebody asked for it."""

    case: Case
    outcome: Outcome
    reading: judging.Reading | None = None


class Driver:
    """The plug-in's working half; in an xdist worker it has an engine of its own."""

    def __init__(self, run: Run) -> None:
        """Start nothing yet: an engine is made when the first case runs."""
        self.run = run
        self.plan = Plan(run.backend, run.options.device, run.options.profile)
        self._engine: Engine | None = None
        self._kept: _Kept | None = None

    def pytest_sessionfinish(self) -> None:
        """End the ranks, if there are any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # ---- which items there are ---------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        """Leave out the checks that --only does not name, before they have items."""
        asked = set(self.run.options.ids)
        marks = [mark for mark in getattr(obj, "pytestmark", ()) if mark.name == "requirement"]
        return [] if asked and marks and not any(asked & set(mark.args) for mark in marks) else None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a check of the corpus its cases, and a check that draws its own workloads its cells."""
        mark = metafunc.definition.get_closest_marker("requirement")
        if mark is None:
            return
        if "cell" in metafunc.fixturenames:
            cells = self.plan.cells
            metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)
        elif "case" in metafunc.fixturenames:
            cases = self.plan.of(mark.kwargs["kind"], mark.kwargs["when"])
            metafunc.parametrize("case", cases, ids=[case.id for case in cases], indirect=True)
        elif "group_lists" in metafunc.fixturenames:
            worlds = self.plan.worlds
            metafunc.parametrize("group_lists", worlds, ids=[f"world-{world}" for world in worlds], indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort by case, so that each runs once: examples of waivers first, then layout by layout."""
        examples = self.run.waivers.examples
        urgent = {_place(item) for item in items if item.name in examples}
        order = self.plan.positions

        def key(item: pytest.Item) -> tuple[bool, bool, int, bool]:
            place = _place(item)
            if place is None:  # no case: where it was, after those that have one
                return (True, True, len(order), True)
            return (place not in urgent, item.name not in examples, order[place], "cell" in _parameters(item))

        items.sort(key=key)

    # ---- fixtures ------------------------------------------------------------------------------------------------

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> Case:
        """The case of this item: a workload in its cell."""
        case: Case = request.param
        trial = trial_of(request.node)
        trial.cell, trial.workload = case.cell, case.workload
        return case

    @pytest.fixture
    def cell(self, request: pytest.FixtureRequest) -> Cell:
        """The variant and layout of an item that draws its own workloads."""
        cell: Cell = request.param
        trial_of(request.node).cell = cell
        return cell

    @pytest.fixture
    def tally(self, request: pytest.FixtureRequest) -> Tally:
        """What this item's judgements have compared."""
        return trial_of(request.node).tally

    @pytest.fixture
    def outcome(self, case: Case, request: pytest.FixtureRequest) -> Outcome:
        """What the case's run brought back; skips where there was nothing to run or the backend refused."""
        trial = trial_of(request.node)
        self._skip_inapplicable(trial, case.cell)
        limit = _limit(case)
        if limit is not None and limit.proof == "undefined":
            trial.skip("limit", f"limit, unproved: {limit.reason}")
        if self._kept is None or self._kept.case is not case:
            self._kept = None
            self._kept = _Kept(case, self._step(trial, case.workload))
        trial.outcome = self._kept.outcome
        if refusal := _refusal(self._kept.outcome):
            trial.skip(*refusal)
        if limit is not None:
            raise Mismatch(
                "run",
                f"the backend declares a limit on {limit.on} that the library refuses to break ({limit.reason}), but "
                "nothing refused",
            )
        return self._kept.outcome

    @pytest.fixture
    def reading(self, outcome: Outcome) -> judging.Reading:
        """The outcome as the judges read it; all checks of a case share one."""
        assert self._kept is not None  # by `outcome`
        if self._kept.reading is None:
            self._kept.reading = judging.read(outcome)
        return self._kept.reading

    @pytest.fixture
    def drive(self, cell: Cell, request: pytest.FixtureRequest) -> Drive:
        """Runs a drawn workload and returns its outcome; rejects a draw that the backend refuses."""
        trial = trial_of(request.node)
        self._skip_inapplicable(trial, cell)
        allowed = [case for case in self.plan.cases if case.cell is cell and not _limit(case)]
        if not allowed:
            trial.skip("limit", f"limit, unproved: every workload breaks a declared limit of {cell.variant}")
        if refusal := _refusal(self._step(trial, allowed[0].workload)):
            trial.skip(*refusal)

        def drive(workload: Workload) -> Outcome:
            trial.outcome = self._step(trial, workload)
            if refusal := _refusal(trial.outcome):
                trial.settled, trial.rejected = refusal
                hypothesis.reject()
            return trial.outcome

        return drive

    @pytest.fixture
    def group_lists(self, request: pytest.FixtureRequest) -> Mapping[Layout, Mapping[str, RankLists]]:
        """The rank lists that the backend would build, for every layout of a world that it has."""
        trial = trial_of(request.node)
        if not hasattr(self.run.backend, "groups"):
            trial.skip("not adapted", "not adapted: the backend does not tell which groups it would build")
        every = tuple(layouts(request.param))
        trial.runs += 1
        try:
            answers = group_lists(self._started, self.run.target, every)
        except CannotTell as error:
            raise RunFailed("groups", f"the backend was asked for its groups: {error}") from error
        told = {layout: lists for layout, lists in zip(every, answers, strict=True) if not isinstance(lists, str)}
        if not told:
            trial.skip("not adapted", f"not adapted: {answers[0]}")
        return told

    def _skip_inapplicable(self, trial: Trial, cell: Cell) -> None:
        if reason := too_large(cell.layout, self.run.options.ranks):
            trial.skip("not applicable", f"not applicable: {reason}")

    def _step(self, trial: Trial, workload: Workload) -> Outcome:
        trial.runs += 1
        return moe_step(self._started, self.run.target, workload)

    @property
    def _started(self) -> Engine:
        if self._engine is None:
            torch.set_num_threads(1)  # the oracles' tensors are tiny: more threads only take the cores from the ranks
            try:
                self._engine = Engine(device=self.run.options.device, **engine_needs(self.run.backend))
            except EngineError as error:  # the machine's or the installation's: no item is at fault
                reason = str(error).partition("\n")[0]
                pytest.exit(f"the ranks cannot start: {reason}; try `moe-conformance doctor`", returncode=_USAGE_ERROR)
        return self._engine

    # ---- how items end -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the item's record to the report of the phase that ended it, and let its verdict be the report's."""
        report = yield
        if item.get_closest_marker("requirement") is None or call.when == "teardown":
            return report
        if call.when == "setup" and report.passed:
            return report
        trial = trial_of(item)
        ended = ending(trial, call.excinfo.value if call.excinfo else None)
        if ended.verdict == "error":
            ended = replace(ended, detail=report.longreprtext)
        record = self._record(item, trial, ended)
        report.user_properties.append((PROPERTY, record.to_json()))
        _translate(report, record)
        return report

    def _record(self, item: pytest.Item, trial: Trial, ended: Ending) -> Record:
        requirements = ended.violated or trial.requirements
        waiver = self._waiver(item, trial, requirements)
        if waiver is not None and ended.verdict in ("fail", "crash", "hang"):
            ended = replace(ended, verdict="waived", message=f"waived by {waiver}: {ended.message}")
        elif waiver is not None and ended.verdict == "pass":
            message = f"{waiver} waives this check, and it passes: narrow the waiver or delete it"
            ended = Ending("unexpected pass", message, "UnexpectedPass")
        tally, outcome = trial.tally, trial.outcome
        return Record(
            node=item.nodeid,
            check=trial.check,
            requirements=requirements,
            verdict=ended.verdict,
            message=ended.message,
            kind=ended.kind,
            stage=ended.stage,
            blamed=ended.blamed,
            variant=trial.cell.variant if trial.cell else None,
            layout=trial.cell.layout.name if trial.cell else None,
            workload=trial.workload.name if trial.workload else None,
            compared={"elements": tally.elements, "pairs": tally.pairs, "ranks": sorted(tally.ranks)},
            worst=min(tally.worst, sys.float_info.max),  # JSON has no infinity
            resolved=dict(outcome.ranks[0].resolved) if outcome else {},
            detail=ended.detail,
            reproduce=self.run.options.command(("-k", item.name), only=requirements),
            waiver=waiver,
            runs=trial.runs,
        )

    def _waiver(self, item: pytest.Item, trial: Trial, requirements: tuple[str, ...]) -> str | None:
        if trial.cell is None:
            return None
        workload = trial.workload.name if trial.workload else None
        asked = Item(item.name, requirements, trial.cell.variant, trial.cell.layout.name, workload)
        waiver = self.run.waivers.match(asked)
        return None if waiver is None else waiver.id


def trial_of(item: pytest.Item) -> Trial:
    """Return what is known of an item so far."""
    if TRIAL not in item.stash:
        mark = item.get_closest_marker("requirement")
        requirements = () if mark is None else tuple(mark.args)
        item.stash[TRIAL] = Trial(requirements, getattr(item, "originalname", None) or item.name)
    return item.stash[TRIAL]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def _place(item: pytest.Item) -> str | None:
    """Return the id of an item's case or cell."""
    parameters = _parameters(item)
    place = parameters.get("case") or parameters.get("cell")
    return place.id if isinstance(place, Case | Cell) else None


def _limit(case: Case) -> Limit | None:
    """Return the first declared limit that a case breaks."""
    return broken(case.cell.limits, case.workload, case.cell.device)


def _refusal(outcome: Outcome) -> tuple[Verdict, str] | None:
    """Return verdict and reason if building was refused; a rank that went on, failed or hung makes it a failure.

    What an adapter refuses proves nothing about the library.
    """
    refusal = outcome.refusal
    if refusal is None or outcome.blamed or any(rank.status == "ok" for rank in outcome.ranks):
        return None
    if refusal.error_by == "library":
        return "refused", f"refused by the library: {refusal.error}"
    return "not adapted", f"not adapted: {refusal.error}"


def _translate(report: pytest.TestReport, record: Record) -> None:
    """Let pytest see the verdict: failing verdicts fail, pass passes, the others are skips with a reason."""
    if record.verdict in FAILING:
        report.outcome = "failed"
        report.longrepr = failure(record)
    elif record.verdict != "pass":
        report.outcome = "skipped"
        path, line, _ = report.location
        report.longrepr = (path, line or 0, record.message)
