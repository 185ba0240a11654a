"""Runs cases on ranks: the next cases run while the outcomes of earlier ones are judged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, wraps
from threading import Thread
from typing import ParamSpec, TypeVar

import pytest
import torch

from moe_conformance.engine import Engine, EngineError
from moe_conformance.engine.hosts import MachineLostError
from moe_conformance.judging.observed import run as judging
from moe_conformance.judging.shared.equivalence.runs import Ran
from moe_conformance.plugin.run import Run, engine_needs
from moe_conformance.plugin.stopping import stop_now
from moe_conformance.scenarios.group_lists import group_lists
from moe_conformance.scenarios.moe_step import Step, start, start_many
from moe_conformance.scenarios.outcome import GroupAnswer, Outcome
from moe_conformance.workloads.plan import VIRTUAL, Case
from moe_conformance.workloads.records.workload import Wish, Workload

_P = ParamSpec("_P")
_R = TypeVar("_R")

MOST_REPEATS = 50  # of a run; each takes new ranks, and more cases than that fail for a reason that they share
MOST_TOGETHER = 16  # cases in a message to the ranks
MOST_AHEAD = 3 * MOST_TOGETHER  # cases of one number of ranks that may have been begun before their items
_USAGE_ERROR = int(pytest.ExitCode.USAGE_ERROR)


@dataclass
class Kept:
    """The outcome of a case, and its reading once a check requests it; all checks of the case share both."""

    case: Case | None  # None: it was drawn
    outcome: Outcome
    alongside: dict[str, Ran] = field(default_factory=dict)  # equivalent runs, by how they differ
    begun: dict[str, Step] = field(default_factory=dict)  # equivalent runs not yet requested, by workload

    @cached_property
    def reading(self) -> judging.Reading:
        """The outcome as the judges read it."""
        return judging.read(self.outcome)


@dataclass(frozen=True)
class _Ahead:
    """A case that was started before its first item ran, in a batch with others."""

    case: Case
    step: Step
    batch: int  # counted from 1
    begun: dict[str, Step] = field(default_factory=dict)  # equivalent runs of it, by workload


@dataclass
class _Lane:
    """The cases that were begun on one number of ranks."""

    ahead: deque[_Ahead] = field(default_factory=deque)  # not yet taken, in running order
    batch: int = 0  # number of the latest batch
    size: int = 1  # of the latest batch; 0 once a case has failed since

    @property
    def idle(self) -> bool:
        """Whether its ranks have nothing to run, and few enough begun cases have not been taken."""
        return not self.ahead or (len(self.ahead) <= MOST_AHEAD - MOST_TOGETHER and self.ahead[-1].step.running.ready)


def _ends_with_its_site(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """End the session if a machine is lost: no item can run any more."""

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except MachineLostError as error:
            stop_now(str(error), int(pytest.ExitCode.TESTS_FAILED))

    return guarded


def _nothing(case: Case) -> Sequence[Workload]:
    return ()


class Outcomes:
    """Runs cases on ranks, which start with the first case.

    Holds the latest case. Those after it run in batches, one batch on each number of ranks at the same time: while the
    cases of a batch are judged its ranks run the next one. A batch has twice as many cases as the one before; the first
    is small, so that its verdicts come early. After a case that failed the next batch has one case.
    """

    def __init__(self, run: Run, foreseen: Callable[[Case], Sequence[Workload]] = _nothing) -> None:
        """Start nothing yet; `foreseen` returns the equivalent runs of a case that its checks will request."""
        self._run = run
        self._deadline_s = run.options.deadline
        self.notice: Callable[[str], None] | None = None  # called with what slow ranks are doing
        self._foreseen = foreseen
        self._opened: Future[Engine] | None = None
        self._kept: Kept | None = None
        self._lanes: dict[int, _Lane] = {}  # by number of ranks
        self._batches = 0
        self._repeated: Kept | None = None
        self._repeats = 0

    def open(self) -> None:
        """Begin to start the engine, which imports for seconds; the first call that needs ranks waits for it.

        A fault is raised by that call. The thread is a daemon: a session that ends earlier does not wait for it.
        """
        if self._opened is None:
            # Tensors of workloads and oracles are tiny: more threads only take the cores from the ranks.
            torch.set_num_threads(1)
            opened: Future[Engine] = Future()
            self._opened = opened
            Thread(target=self._open, args=(opened,), name="opens the engine", daemon=True).start()

    def holds(self, case: Case) -> bool:
        """Whether the outcome of the case is held, so that nothing has to run."""
        return self._kept is not None and self._kept.case is case

    @_ends_with_its_site
    def of(self, case: Case, following: Sequence[Case]) -> Kept:
        """Return the outcome of a case, and begin some of the cases that follow it in running order."""
        if self._kept is None or self._kept.case is not case:
            self._kept = self._repeated = None
            first = not self._batches
            taken = self._take(case)
            # Before the outcome is read: so that the ranks need not wait for it.
            for world in sorted({_world(next_case) for next_case in following}):
                lane = self._lane(world)
                if lane.batch == taken.batch or (lane.idle and not first):  # no verdict waits for others to start
                    self._begin(lane, [next_case for next_case in following if _world(next_case) == world])
            self._kept = Kept(case, taken.step.outcome(), begun=taken.begun)
            if not all(rank.status in ("ok", "refused") for rank in self._kept.outcome.ranks):
                self._lane(_world(case)).size = 0  # a backend that fails fails often, and each time a batch in vain
        return self._kept

    @_ends_with_its_site
    def step(self, workload: Workload, deadline_s: float | None = None) -> Outcome:
        """Run a workload now; cases that were begun keep their outcomes."""
        return start(self._started, self._run.target, workload, deadline_s or self._deadline_s).outcome()

    @_ends_with_its_site
    def steps(self, workloads: Sequence[Workload]) -> list[Outcome]:
        """Run workloads of one world now, together."""
        if not workloads:
            return []
        return [step.outcome() for step in start_many(self._started, self._run.target, workloads, self._deadline_s)]

    @_ends_with_its_site
    def equivalent_runs(self, kept: Kept, workloads: Sequence[Workload]) -> list[Outcome]:
        """Return the outcomes of equivalent runs of a case; those that were not begun with it run now, together."""
        begun: dict[int, Step] = {}
        for workload in workloads:
            if (step := kept.begun.pop(workload.name, None)) is not None:
                begun[id(workload)] = step
        others = [workload for workload in workloads if id(workload) not in begun]
        ran = dict(zip(map(id, others), self.steps(others), strict=True))
        return [begun[id(workload)].outcome() if id(workload) in begun else ran[id(workload)] for workload in workloads]

    @_ends_with_its_site
    def renew(self, world: int) -> None:
        """Wait for what was begun on that many ranks, then end them: the next run on as many has new ones."""
        self._finish(world)
        self._started.renew(world)

    @_ends_with_its_site
    def again(self, case: Case | None, workload: Workload) -> Kept | None:
        """Run a workload once more, on new ranks; None if MOST_REPEATS workloads were repeated already.

        All checks of a case share its repeat.
        """
        if self._repeated is None or self._repeated.outcome.workload is not workload:
            if self._repeats == MOST_REPEATS:
                return None
            self._repeats += 1
            self.renew(workload.layout.world)
            self._repeated = Kept(case, start(self._started, self._run.target, workload, self._deadline_s).outcome())
        return self._repeated

    @_ends_with_its_site
    def group_lists(self, wishes: tuple[Wish, ...]) -> list[GroupAnswer]:
        """Return the backend's answer to every wish; a rank calls its `groups`.

        Raises:
            NoAnswer: the rank did not answer.
        """
        return group_lists(self._started, self._run.target, wishes)

    def close(self) -> None:
        """End the ranks, if there are any."""
        self._lanes.clear()
        opened, self._opened = self._opened, None
        if opened is not None and opened.exception() is None:
            opened.result().close()

    def _lane(self, world: int) -> _Lane:
        return self._lanes.setdefault(world, _Lane())

    def _take(self, case: Case) -> _Ahead:
        lane = self._lane(_world(case))
        while lane.ahead:
            if (ahead := lane.ahead.popleft()).case is case:
                return ahead
        self._batches += 1
        lane.batch, lane.size = self._batches, 1
        return _Ahead(case, start(self._started, self._run.target, case.workload, self._deadline_s), lane.batch)

    def _begin(self, lane: _Lane, following: Sequence[Case]) -> None:
        """Begin the first of some cases of a lane that are not begun yet, as many as may run together."""
        cases = [case for case in following if all(case is not ahead.case for ahead in lane.ahead)]
        lane.size = min(2 * lane.size, MOST_TOGETHER) or 1
        together = _together(cases[: lane.size])
        if not together:
            return
        chosen: list[tuple[Case, Sequence[Workload]]] = []
        count = 0
        for case in together:
            twins = self._foreseen(case)
            count += 1 + len(twins)
            if chosen and count > MOST_TOGETHER:
                break
            chosen.append((case, twins))
        workloads = [workload for case, twins in chosen for workload in (case.workload, *twins)]
        try:
            steps = iter(start_many(self._started, self._run.target, workloads, self._deadline_s))
        except EngineError:  # raised again, and reported, when the item of the case runs
            return
        self._batches += 1
        lane.batch = self._batches
        for case, twins in chosen:
            step = next(steps)
            lane.ahead.append(_Ahead(case, step, lane.batch, {twin.name: next(steps) for twin in twins}))

    def _finish(self, world: int) -> None:
        """Wait for what was begun on that many ranks, so that its outcomes are kept when they end."""
        steps = [ahead.step for ahead in self._lane(world).ahead]
        if self._kept is not None:
            steps += self._kept.begun.values()
        for step in steps:
            step.running.finish()

    @property
    def _started(self) -> Engine:
        self.open()
        assert self._opened is not None
        try:
            return self._opened.result()
        except EngineError as error:  # the machine's or the installation's: no item is at fault
            reason = str(error).partition("\n")[0]
            pytest.exit(f"the ranks cannot start: {reason}; try `moe-conformance doctor`", returncode=_USAGE_ERROR)

    def _notice(self, sentence: str) -> None:
        if self.notice is not None:
            self.notice(sentence)

    def _open(self, opened: Future[Engine]) -> None:
        options = self._run.options
        try:
            engine = Engine(
                device=options.device,
                virtual=options.profile == VIRTUAL,
                cluster=self._run.site,
                notice=self._notice,
                **engine_needs(self._run.backend),
            )
        except BaseException as error:
            opened.set_exception(error)
        else:
            opened.set_result(engine)


def _world(case: Case) -> int:
    return case.workload.layout.world


def _together(cases: Sequence[Case]) -> Sequence[Case]:
    """Return the first cases that may run on the same ranks; a case that changes its process runs alone."""
    for number, case in enumerate(cases):
        if case.workload.twist.lifetime:
            return cases[: max(number, 1)]
    return cases
