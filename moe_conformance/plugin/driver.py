"""The driver: gives checks their cases, and what each brought back from the ranks, and sees how every item ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import cast

import pytest

from moe_conformance.contract import Limit
from moe_conformance.engine import EngineError
from moe_conformance.judging import reading as judging
from moe_conformance.judging.verdict import Mismatch, RunFailed, Tally
from moe_conformance.plan import Case, Cell, Plan, too_large
from moe_conformance.plugin import agenda, repeating, roster
from moe_conformance.plugin.alongside import Twins
from moe_conformance.plugin.drawing import Drive, Search
from moe_conformance.plugin.outcomes import MOST_AHEAD, Outcomes
from moe_conformance.plugin.recording import attach, record_of, translate, waiver_of
from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending, Trial, ending, refusal_of, trial_of
from moe_conformance.scenarios.group_lists import CannotTell
from moe_conformance.scenarios.outcome import Outcome, Told
from moe_conformance.scenarios.script import SESSION
from moe_conformance.topology import Layout, RankLists
from moe_conformance.waivers import Item
from moe_conformance.workloads import distribution, group_sizes
from moe_conformance.workloads.features import broken
from moe_conformance.workloads.freedom import Freedom
from moe_conformance.workloads.records import Asynchrony, Wish, Workload


class Driver:
    """The plug-in's working half; in an xdist worker it has an engine of its own."""

    def __init__(self, run: Run) -> None:
        """Start nothing yet: ranks start with the first case.

        Raises:
            Unusable: there are fewer cells than shards.
        """
        self.run = run
        asynchrony = cast(Asynchrony, run.options.asynchrony)
        options, kept = run.options, run.waivers.example_cases
        part = options.rotated
        self.plan = Plan(run.backend, options.device, options.profile, options.ranks, asynchrony, part, kept)
        self.other_cells = agenda.other_cells(self.plan, run.options)
        self._outcomes = Outcomes(run)
        self._followers: dict[str, tuple[Case, ...]] = {}

    def pytest_sessionfinish(self) -> None:
        """End the ranks, if there are any."""
        self._outcomes.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Have the ranks' imports done while items are collected."""
        if not session.config.option.collectonly:
            self._outcomes.open()
        return (yield)

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
            drawing = self.plan.drawing(_drawn_kind(metafunc.definition))
            cells = [cell for cell in drawing if cell.id not in self.other_cells]
            metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)
        elif "case" in metafunc.fixturenames:
            cases = self.plan.of(mark.kwargs["kind"], mark.kwargs["when"], without=self.other_cells)
            metafunc.parametrize("case", cases, ids=[case.id for case in cases], indirect=True)
        elif asked := {"group_lists", "group_answers"} & set(metafunc.fixturenames):
            worlds = self.plan.worlds
            metafunc.parametrize(asked.pop(), worlds, ids=[f"world-{world}" for world in worlds], indirect=True)
        elif "size_answers" in metafunc.fixturenames:
            sizes = [(world, kind) for world in self.plan.worlds for kind in group_sizes.KINDS]
            ids = [f"world-{world}-{kind}" for world, kind in sizes]
            metafunc.parametrize("size_answers", sizes, ids=ids, indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the other shards' items to them; sort by case, so that each runs once.

        What the quick profile leaves out are cases alone: the checks that have none are of that profile itself.
        """
        others = [item for item in items if self._of_others(item)]
        if others:
            items[:] = [item for item in items if not self._of_others(item)]
            config.hook.pytest_deselected(items=others)
        agenda.sort(items, self.run.waivers.examples)

    def _of_others(self, item: pytest.Item) -> bool:
        if self.other_cells and agenda.of_others(item, self.other_cells):
            return True
        return self.plan.rotation is not None and agenda.scope_of(item) == ""

    @pytest.hookimpl(tryfirst=True)  # before xdist tells the controller that it is done
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn which cases follow which. An xdist worker is only sure of those of the same cell."""
        self._followers = agenda.followers(session.items, self._runs, MOST_AHEAD)
        if hasattr(session.config, "workerinput"):
            roster.hand_over(session.config.workerinput, session.items)
            cells = {item.nodeid: agenda.cell_of(item) for item in session.items}
            self._followers = {
                node: tuple(takewhile(lambda case, cell=cells[node]: case.cell is cell, following))  # type: ignore[misc]
                for node, following in self._followers.items()
            }

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
        trial.runs += not self._outcomes.holds(case)
        outcome = self._outcomes.of(case, self._followers.get(request.node.nodeid, ())).outcome
        trial.outcome = outcome
        _examine(trial, case, outcome)
        return outcome

    @pytest.fixture
    def reading(self, outcome: Outcome, case: Case) -> judging.Reading:
        """The outcome as the judges read it; all checks of a case share one."""
        del outcome  # it is there
        return self._outcomes.of(case, ()).reading

    @pytest.fixture
    def twins(self, outcome: Outcome, request: pytest.FixtureRequest) -> Twins:
        """Runs twins of the case beside it."""
        del outcome  # it is there: a case that was refused has no twins
        step = partial(self._step, trial_of(request.node))
        return Twins(self.run.backend, self.run.options.device, step, self._outcomes.renew)

    @pytest.fixture
    def drive(self, cell: Cell, request: pytest.FixtureRequest) -> Drive:
        """Runs every workload that a strategy draws on the ranks and has it judged."""
        trial = trial_of(request.node)
        kind = _drawn_kind(request.node)
        self._skip_inapplicable(trial, cell)
        allowed = [case for case in self.plan.of(kind, None) if case.cell is cell and not _limit(case)]
        if not allowed:
            trial.skip("limit", f"limit, unproved: every workload breaks a declared limit of {cell.variant}")
        asked = allowed[:1] if kind == "probe" else allowed  # a router may refuse some configurations and not others
        refusals = list(takewhile(bool, (refusal_of(self._step(trial, case.workload)) for case in asked)))
        if len(refusals) == len(asked) and refusals[0]:
            trial.skip(*refusals[0])
        freedom = Freedom.under(cell.limits, cell.layout, cell.device)
        item = Item(request.node.name, trial.requirements, cell.variant, cell.layout.name, None)
        features = distribution.required(kind, freedom)
        left_out = [feature for feature in features if self.run.waivers.leaves_out(item, feature.name)]
        required = [feature for feature in features if feature not in left_out]
        return Search(trial, required, left_out, partial(self._step, trial), request.node.name).hold

    @pytest.fixture
    def group_lists(self, request: pytest.FixtureRequest) -> Mapping[Layout, Mapping[str, RankLists]]:
        """The rank lists that the backend would build, for every layout of a world that it has."""
        trial = trial_of(request.node)
        answers = self._answers(trial, tuple(Wish(layout) for layout in group_sizes.possible(request.param)))
        if raised := [f"{wish}: {told.error}" for wish, told in answers.items() if told.by == "raised"]:
            raise RunFailed("groups", f"the backend was asked for its groups with {raised[0]}")
        lists = {wish.layout: told.lists for wish, told in answers.items() if told.lists is not None}
        if not lists:
            trial.skip("not adapted", f"not adapted: {next(iter(answers.values())).error}")
        return lists

    @pytest.fixture
    def group_answers(self, request: pytest.FixtureRequest) -> Mapping[Wish, Told]:
        """What the backend answers for every layout of a world in every order of axes."""
        return self._answers(trial_of(request.node), self._wishes(request.param, group_sizes.LAYOUTS))

    @pytest.fixture
    def size_answers(self, request: pytest.FixtureRequest) -> Mapping[Wish, Told]:
        """What the backend answers for sizes of one kind: each kind is an item, so that one fault hides no other."""
        return self._answers(trial_of(request.node), self._wishes(*request.param))

    def _wishes(self, world: int, kind: str) -> tuple[Wish, ...]:
        """Return sizes of a kind; those of layouts in every order of axes."""
        orders = ("", *getattr(self.run.backend, "orders", ())) if kind == group_sizes.LAYOUTS else ("",)
        return tuple(Wish(layout, order) for order in orders for layout in group_sizes.of_kind(kind, world))

    def _answers(self, trial: Trial, wishes: tuple[Wish, ...]) -> dict[Wish, Told]:
        if not hasattr(self.run.backend, "groups"):
            trial.skip("not adapted", "not adapted: the backend does not tell which groups it would build")
        trial.runs += 1
        try:
            return dict(zip(wishes, self._outcomes.group_lists(wishes), strict=True))
        except CannotTell as error:
            raise RunFailed("groups", f"the backend was asked for its groups: {error}") from error

    def _runs(self, case: Case) -> bool:
        """Whether a case is run at all: on enough ranks, within the limits that nobody may break."""
        limit = _limit(case)
        return not (too_large(case.cell.layout, self.run.options.ranks) or (limit and limit.proof == "undefined"))

    def _skip_inapplicable(self, trial: Trial, cell: Cell) -> None:
        if reason := too_large(cell.layout, self.run.options.ranks):
            trial.skip("not applicable", f"not applicable: {reason}")

    def _step(self, trial: Trial, workload: Workload, deadline_s: float = 60.0) -> Outcome:
        trial.runs += 1
        return self._outcomes.step(workload, deadline_s)

    # ---- how items end -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the item's record to the report of the phase that ended it, and let its verdict be the report's."""
        if call.when == "teardown":
            trial_of(item).outcome = None  # nothing reads it any more, and there are thousands
        goes_on = call.when == "teardown" or (call.when == "setup" and call.excinfo is None)
        if goes_on or item.get_closest_marker("requirement") is None:
            return (yield)
        trial = trial_of(item)
        ended = ending(trial, call.excinfo.value if call.excinfo else None)
        with _tracebacks(item.config, wanted=ended.verdict == "error"):
            report = yield
        if ended.verdict == "error":
            ended = replace(ended, detail=report.longreprtext)
        ended = self._look_again(item, trial, ended)
        record = record_of(self.run, item, trial, ended)
        attach(report, record, item.config)
        translate(report, record, self.run)
        return report

    def _look_again(self, item: pytest.Item, trial: Trial, ended: Ending) -> Ending:
        """Return how a failed item ended in the light of a repeat on new ranks.

        What a waiver or a plant foretells is not repeated.
        """
        if ended.verdict not in ("fail", "crash", "hang") or trial.outcome is None or self.run.options.plant:
            return ended
        if waiver_of(self.run, item, trial, ended.violated or trial.requirements):
            return ended
        case = agenda.case_of(item)
        failed = next((mismatch.outcome for mismatch in ended.failed), None) or trial.outcome
        try:
            kept = self._outcomes.again(case, failed.workload)
            if kept is None:
                return ended
            if case is None:
                second = repeating.drawn_again(trial, kept.outcome)
            else:
                second = repeating.judge_again(item, case, kept, _examine, self._outcomes.step)
        except (repeating.CannotRepeat, EngineError):
            return ended
        return repeating.compared(ended, second)


def _examine(trial: Trial, case: Case, outcome: Outcome) -> None:
    """End the item where the outcome alone decides it: the backend refused, or should have."""
    if refusal := refusal_of(outcome):
        trial.skip(*refusal)
    limit = _limit(case)
    if limit is not None and case.workload.kind != SESSION:  # there refusals are answers
        raise Mismatch(
            "run",
            f"the backend declares a limit on {limit.on} that the library refuses to break ({limit.reason}), but "
            "nothing refused",
        )


@contextmanager
def _tracebacks(config: pytest.Config, *, wanted: bool) -> Iterator[None]:
    """Have pytest write no traceback where a verdict says it all: it reads and parses every file on the way."""
    asked = config.getoption("tbstyle", "auto")  # there is no option without the terminal's plug-in
    if not wanted:
        config.option.tbstyle = "line"
    try:
        yield
    finally:
        config.option.tbstyle = asked


def _drawn_kind(item: pytest.Item) -> str:
    """Return the kind of workload that a check draws, given the kind in its mark: "drawn probe" or "drawn route"."""
    mark = item.get_closest_marker("requirement")
    return "" if mark is None else str(mark.kwargs["kind"]).removeprefix("drawn ")


def _limit(case: Case) -> Limit | None:
    """Return the first declared limit that a case breaks."""
    return broken(case.cell.limits, case.workload, case.cell.device)
