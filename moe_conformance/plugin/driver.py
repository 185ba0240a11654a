"""The driver: what pytest collects, the order of items, fixtures of checks that read no case, and how items end."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import cast

import pytest
from _pytest.runner import runtestprotocol

from moe_conformance.contract.topology import Layout, RankLists
from moe_conformance.judging.verdict import RunFailed, Tally
from moe_conformance.plugin import agenda, case_items, repeating, roster
from moe_conformance.plugin.case_items import CaseItem
from moe_conformance.plugin.case_run import CaseRun, limit_of
from moe_conformance.plugin.drawing import Drive, Search
from moe_conformance.plugin.outcomes import MOST_AHEAD, Outcomes
from moe_conformance.plugin.recording import attach, record_of, translate
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Trial, ending, forget, trial_of
from moe_conformance.report.standing import Place, places
from moe_conformance.report.unjudged import BY_DESIGN
from moe_conformance.reproducing.examining import refusal_of
from moe_conformance.scenarios.group_lists import NoAnswer
from moe_conformance.scenarios.outcome import GroupAnswer
from moe_conformance.waiving import Item
from moe_conformance.workloads import group_sizes
from moe_conformance.workloads.drawn import distribution
from moe_conformance.workloads.drawn.freedom import Freedom
from moe_conformance.workloads.plan import Case, Cell, Plan
from moe_conformance.workloads.records.runs import DrawnRuns, DrawnStep, RouterStep
from moe_conformance.workloads.records.workload import Asynchrony, Wish

_NO_CELL = "[NOTSET]"  # ends the name of an item that pytest skips, since there is nothing to parametrize it by


class Driver:
    """The part of the plug-in that runs items; every xdist worker has one, with an engine."""

    def __init__(self, run: Run) -> None:
        """Plan the run; ranks start with the first case.

        Raises:
            Unusable: there are fewer cells than shards.
        """
        self.run = run
        asynchrony = cast(Asynchrony, run.options.asynchrony)
        options, kept = run.options, run.waivers.example_cases
        part = options.rotated
        self.plan = Plan(run.backend, options.device, options.profile, options.ranks, asynchrony, part, kept)
        self.other_cells = agenda.other_cells(self.plan, run.options)
        self.outcomes = Outcomes(run, lambda case: self.cases.foreseen(case))
        self.cases = CaseRun(run, self.outcomes)
        self._tried: dict[str, Sequence[Case]] = {}  # by node id of an item that draws: see `_tried_first`
        self.in_part: set[Place] = set()  # of these some items were not selected

    def pytest_sessionfinish(self) -> None:
        """End the ranks, if there are any."""
        self.outcomes.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Start the ranks' imports while items are collected, and keep the items out of garbage collection."""
        if not session.config.option.collectonly:
            self.outcomes.open()
        with _uncollected():
            return (yield)

    # ---- which items there are ---------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Module | pytest.Class, name: str, obj: object
    ) -> list[pytest.Item] | None:
        """Leave out the checks that --only does not name; make a node per case of a check that reads cases."""
        marks = [mark for mark in getattr(obj, "pytestmark", ()) if mark.name == "requirement"]
        if not marks or not collector.istestfunction(obj, name):
            return None
        wanted = set(self.run.options.ids)
        if wanted and not any(wanted & set(mark.args) for mark in marks):
            return []
        check = case_items.case_function(collector, name, obj)
        if check is None:
            return None
        run, when = check.mark.kwargs["run"], check.mark.kwargs["when"]
        return case_items.checks_of(collector, check, self.plan.of(run, when, without=self.other_cells))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a check that draws workloads by cell, and a check of groups by world."""
        mark = metafunc.definition.get_closest_marker("requirement")
        if mark is None:
            return
        if "cell" in metafunc.fixturenames:
            drawing = self.plan.drawing(_drawn(metafunc.definition))
            cells = [cell for cell in drawing if cell.id not in self.other_cells]
            metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)
        elif group_fixtures := {"group_lists", "group_answers"} & set(metafunc.fixturenames):
            worlds = self.plan.worlds
            metafunc.parametrize(
                group_fixtures.pop(), worlds, ids=[f"world-{world}" for world in worlds], indirect=True
            )
        elif "size_answers" in metafunc.fixturenames:
            sizes = [(world, kind) for world in self.plan.worlds for kind in group_sizes.KINDS]
            ids = [f"world-{world}-{kind}" for world, kind in sizes]
            metafunc.parametrize("size_answers", sizes, ids=ids, indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the items of other shards; sort by case, so that a case runs once.

        What the quick profile leaves out, and what the smoke profile runs, are cases only: checks without a case are
        items of the quick profile.
        """
        others = [item for item in items if self._of_others(item)]
        if others:
            items[:] = [item for item in items if not self._of_others(item)]
            config.hook.pytest_deselected(items=others)
        # In an xdist worker cases follow each other by cell.
        power = {} if hasattr(config, "workerinput") else self.plan.power
        agenda.sort(items, self.run.waivers.examples, power)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Record the places of which the run has only a part."""
        self.in_part |= places(roster.roster(items).values())

    def _of_others(self, item: pytest.Item) -> bool:
        if self.other_cells and agenda.of_others(item, self.other_cells):
            return True
        return self.plan.cases_alone and agenda.scope_of(item) == ""

    @pytest.hookimpl(tryfirst=True)  # before xdist tells the controller that it is done
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Join checks by case, and find the cases that follow an item: in an xdist worker those of the same cell."""
        if session.config.option.collectonly:
            return
        session.items[:] = case_items.by_case(session.items, self.cases)
        followers = agenda.followers(session.items, self.cases.runs, MOST_AHEAD)
        if hasattr(session.config, "workerinput"):
            roster.hand_over(session.config.workerinput, session.items, self.in_part)
            cells = {item.nodeid: agenda.cell_of(item) for item in session.items}
            followers = {
                node: tuple(takewhile(lambda case, cell=cells[node]: case.cell is cell, following))  # type: ignore[misc]
                for node, following in followers.items()
            }
        self.cases.followers = followers
        self.cases.checks = {item.case.id: item.checks for item in session.items if isinstance(item, CaseItem)}
        drawing = [item for item in session.items if "drive" in getattr(item, "fixturenames", ())]
        self._tried = {item.nodeid: self._tried_first(item) for item in drawing}
        self.plan.forget()  # items hold the cases that run, which are few of those drawn

    def _tried_first(self, item: pytest.Item) -> Sequence[Case]:
        """Return the cases that run before an item draws: if the backend refuses all of them, the item is skipped.

        They are within the limits: all of a router, which may refuse some configurations only, else the first.
        """
        run, cell = _drawn(item), agenda.cell_of(item)
        assert cell is not None
        allowed = [case for case in self.plan.in_cell(run, cell) if not limit_of(case)]
        return allowed if isinstance(run, RouterStep) else allowed[:1]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Set the number of checks, of which pytest shows the progress."""
        session.testscollected = sum(1 for _ in case_items.checks_of_items(session.items)) or session.testscollected

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run an item of a case; its checks report, and the item itself only where it fails outside of them."""
        if not isinstance(item, CaseItem):
            return None
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.failed:
                item.ihook.pytest_runtest_logreport(report=report)
        self.cases.end(item)
        return True

    # ---- fixtures ------------------------------------------------------------------------------------------------

    @pytest.fixture
    def cell(self, request: pytest.FixtureRequest) -> Cell:
        """The variant and layout of an item that draws workloads."""
        cell: Cell = request.param
        trial_of(request.node).cell = cell
        return cell

    @pytest.fixture
    def tally(self, request: pytest.FixtureRequest) -> Tally:
        """Counts what this item's judgements have compared."""
        return trial_of(request.node).tally

    @pytest.fixture
    def drive(self, cell: Cell, request: pytest.FixtureRequest) -> Drive:
        """Runs every workload that a strategy draws on the ranks, and calls the judge on its outcome."""
        trial = trial_of(request.node)
        run = _drawn(request.node)
        self.cases.require_ranks(trial, cell)
        tried = self._tried[request.node.nodeid]
        if not tried:
            limits = [limit_of(case) for case in self.plan.in_cell(run, cell)]
            if reasons := [limit.reason for limit in limits if limit is not None and limit.proof == "design"]:
                trial.skip("not applicable", f"{BY_DESIGN}: {reasons[0]}")
            trial.skip("limit", f"limit, unproved: every workload is outside a declared limit of {cell.variant}")
        refusals = list(takewhile(bool, (refusal_of(self.cases.step(trial, case.workload)) for case in tried)))
        if len(refusals) == len(tried) and refusals[0]:
            trial.skip(*refusals[0])
        freedom = Freedom.under(cell.limits, cell.layout, cell.device)
        item = Item(request.node.name, trial.requirements, cell.variant, cell.layout.name, None)
        features = distribution.required(run, freedom)
        left_out = [feature for feature in features if self.run.waivers.leaves_out(item, feature.name)]
        required = [feature for feature in features if feature not in left_out]
        return Search(trial, required, left_out, partial(self.cases.step, trial), request.node.name).hold

    @pytest.fixture
    def group_lists(self, request: pytest.FixtureRequest) -> Mapping[Layout, Mapping[str, RankLists]]:
        """The rank lists that the backend would build, for every layout of a world that it has."""
        trial = trial_of(request.node)
        answers = self._answers(trial, tuple(Wish(layout) for layout in group_sizes.possible(request.param)))
        if raised := [f"{wish}: {answer.error}" for wish, answer in answers.items() if answer.by == "raised"]:
            raise RunFailed("groups", f"groups() of the backend was called with {raised[0]}")
        lists = {wish.layout: answer.lists for wish, answer in answers.items() if answer.lists is not None}
        if not lists:
            trial.skip("not adapted", f"not adapted: {next(iter(answers.values())).error}")
        return lists

    @pytest.fixture
    def group_answers(self, request: pytest.FixtureRequest) -> Mapping[Wish, GroupAnswer]:
        """What the backend answers for every layout of a world in every order of axes."""
        return self._answers(trial_of(request.node), self._wishes(request.param, group_sizes.LAYOUTS))

    @pytest.fixture
    def size_answers(self, request: pytest.FixtureRequest) -> Mapping[Wish, GroupAnswer]:
        """What the backend answers for sizes of one kind: every kind is an item, so that one fault hides no other."""
        return self._answers(trial_of(request.node), self._wishes(*request.param))

    def _wishes(self, world: int, kind: str) -> tuple[Wish, ...]:
        """Return sizes of a kind; those of layouts in every order of axes."""
        orders = ("", *getattr(self.run.backend, "orders", ())) if kind == group_sizes.LAYOUTS else ("",)
        return tuple(Wish(layout, order) for order in orders for layout in group_sizes.of_kind(kind, world))

    def _answers(self, trial: Trial, wishes: tuple[Wish, ...]) -> dict[Wish, GroupAnswer]:
        if not hasattr(self.run.backend, "groups"):
            trial.skip("not adapted", "not adapted: the backend has no groups()")
        trial.runs += 1
        try:
            return dict(zip(wishes, self.outcomes.group_lists(wishes), strict=True))
        except NoAnswer as error:
            raise RunFailed("groups", f"groups() of the backend raised {error}") from error

    # ---- how items end -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the item's record to the report of the phase that ended it, with its verdict."""
        if call.when == "teardown":
            forget(item)  # it holds an outcome
        has_not_ended = call.when == "teardown" or (call.when == "setup" and call.excinfo is None)
        if has_not_ended or item.get_closest_marker("requirement") is None:
            return (yield)
        trial = trial_of(item)
        if call.when == "setup" and item.name.endswith(_NO_CELL):
            trial.settled = "not run"
        ended = ending(trial, call.excinfo.value if call.excinfo else None)
        with _tracebacks(item.config, wanted=ended.verdict == "error"):
            report = yield
        if ended.verdict == "error":
            ended = replace(ended, detail=report.longreprtext)
        ended = repeating.looked_again(
            self.run, self.outcomes, item, trial, ended, None, lambda kept: repeating.drawn_again(trial, kept.outcome)
        )
        record = record_of(self.run, item, trial, ended)
        attach(report, record, item.config)
        translate(report, record, self.run)
        return report


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage inside, and exempt from later collections all objects that then exist.

    Python examines all objects whenever their number has grown by a quarter, and items, cases and imported modules are
    a million objects that stay.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def _tracebacks(config: pytest.Config, *, wanted: bool) -> Iterator[None]:
    """Have pytest write no traceback unless it is wanted: pytest reads and parses every file of the traceback."""
    style = config.getoption("tbstyle", "auto")  # there is no option without the terminal's plug-in
    if not wanted:
        config.option.tbstyle = "line"
    try:
        yield
    finally:
        config.option.tbstyle = style


def _drawn(item: pytest.Item) -> DrawnStep:
    """Return the run of which a check draws workloads."""
    mark = item.get_closest_marker("requirement")
    assert mark is not None
    drawn: DrawnRuns = mark.kwargs["run"]
    return drawn.of
