"""The ranks at work: the outcome of one case after the other, the next case running while one is judged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import ParamSpec, TypeVar

import pytest
import torch

from moe_conformance.engine import Engine, EngineError
from moe_conformance.engine.host import SiteLostError
from moe_conformance.judging import reading as judging
from moe_conformance.plan import VIRTUAL, Case
from moe_conformance.plugin.run import Run, engine_needs
from moe_conformance.plugin.stopping import stop_now
from moe_conformance.scenarios.group_lists import group_lists
from moe_conformance.scenarios.moe_step import Step, start
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.topology import Layout, RankLists
from moe_conformance.workloads.records import Workload

_P = ParamSpec("_P")
_R = TypeVar("_R")

MOST_REPEATS = 50  # of a run; each takes new ranks, and more cases than that fail for a reason that they share
_USAGE_ERROR = int(pytest.ExitCode.USAGE_ERROR)


@dataclass
class Kept:
    """What a case brought back, and its reading once somebody asked for it; all checks of the case share both."""

    case: Case | None  # None: it was drawn
    outcome: Outcome

    @cached_property
    def reading(self) -> judging.Reading:
        """The outcome as the judges read it."""
        return judging.read(self.outcome)


@dataclass(frozen=True)
class _Ahead:
    """A case that was started before its first item asked for it."""

    case: Case
    step: Step


def _ends_with_its_site(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make the session end where a machine is lost: no item could run any more."""

    @wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except SiteLostError as error:
            stop_now(str(error), int(pytest.ExitCode.TESTS_FAILED))

    return guarded


class Outcomes:
    """Runs cases on ranks of its own, which start with the first; holds the latest case and runs one ahead."""

    def __init__(self, run: Run) -> None:
        """Start nothing yet."""
        self._run = run
        self._engine: Engine | None = None
        self._kept: Kept | None = None
        self._ahead: _Ahead | None = None
        self._repeated: Kept | None = None
        self._repeats = 0

    def holds(self, case: Case) -> bool:
        """Whether asking for the case runs nothing."""
        return self._kept is not None and self._kept.case is case

    @_ends_with_its_site
    def of(self, case: Case, following: Case | None) -> Kept:
        """Return what a case brought back; if it had to run for that, begin the following one."""
        if self._kept is None or self._kept.case is not case:
            self._kept = None
            self._kept = Kept(case, self._take(case))
            if following is not None:
                self._begin(following)
        return self._kept

    @_ends_with_its_site
    def step(self, workload: Workload, deadline_s: float = 60.0) -> Outcome:
        """Run a workload now."""
        self._drop()
        return start(self._started, self._run.target, workload, deadline_s).outcome()

    @_ends_with_its_site
    def again(self, case: Case | None, workload: Workload) -> Kept | None:
        """Return what a workload brings back from new ranks, once more; None if enough was repeated already.

        All checks of a case share its repeat. What ran ahead begins anew.
        """
        if self._repeated is None or self._repeated.outcome.workload is not workload:
            if self._repeats == MOST_REPEATS:
                return None
            self._repeats += 1
            ahead, self._ahead = self._ahead, None
            self._started.renew()
            self._repeated = Kept(case, start(self._started, self._run.target, workload).outcome())
            if ahead is not None:
                self._begin(ahead.case)
        return self._repeated

    @_ends_with_its_site
    def group_lists(self, every: tuple[Layout, ...]) -> list[dict[str, RankLists] | str]:
        """Ask the backend for its groups, on a rank.

        Raises:
            CannotTell: the rank did not answer.
        """
        self._drop()
        return group_lists(self._started, self._run.target, every)

    def close(self) -> None:
        """End the ranks, if there are any, and what runs on them."""
        self._ahead = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _take(self, case: Case) -> Outcome:
        if self._ahead is None or self._ahead.case is not case:
            return self.step(case.workload)
        ahead, self._ahead = self._ahead, None
        return ahead.step.outcome()

    def _begin(self, case: Case) -> None:
        try:
            self._ahead = _Ahead(case, start(self._started, self._run.target, case.workload))
        except EngineError:  # the case's own item will meet it again, and tell it
            self._ahead = None

    def _drop(self) -> None:
        """Wait for what nobody came for: the ranks can have one job only."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with suppress(EngineError):
                ahead.step.outcome()

    @property
    def _started(self) -> Engine:
        if self._engine is None:
            torch.set_num_threads(1)  # the oracles' tensors are tiny: more threads only take the cores from the ranks
            try:
                options = self._run.options
                self._engine = Engine(
                    device=options.device,
                    virtual=options.profile == VIRTUAL,
                    site=self._run.site,
                    **engine_needs(self._run.backend),
                )
            except EngineError as error:  # the machine's or the installation's: no item is at fault
                reason = str(error).partition("\n")[0]
                pytest.exit(f"the ranks cannot start: {reason}; try `moe-conformance doctor`", returncode=_USAGE_ERROR)
        return self._engine
