"""What the tests of planted bugs run: the next one is on the ranks while the last is judged, and faults run elsewhere.

A rank that hangs is waited for, and ranks that a fault has ended are replaced: nobody computes meanwhile. Runs of which
a fault is expected have ranks of their own, so that the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.moe_step import Step, moe_step, start
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads import recipes, routers, scripts
from moe_conformance.workloads.records.workload import Workload

DEADLINE_S = 20.0
PRELOAD = ("moe_conformance.scenarios.moe_step", "self_tests.planted_bugs")


@dataclass(frozen=True)
class Run:
    """A workload through a variant of a backend; all tests that ask for it share its outcome."""

    backend: str
    variant: str
    layout: Layout
    workload: str

    def drawn(self) -> Workload:
        """Return the workload itself."""
        return workloads(self.variant, self.layout)[self.workload]


@cache
def workloads(variant: str, layout: Layout) -> dict[str, Workload]:
    """Return the quick corpus of a variant on a layout, by name, and all scripts of the full profile."""
    drawn = (
        *recipes.corpus(variant, layout, "quick"),
        *routers.routing_corpus(variant, layout),
        *(workload for _, workload in scripts.scripts(variant, layout, "full")),
    )
    return {workload.name: workload for workload in drawn}


class Runs:
    """Runs what tests ask for, in the order in which they will ask, and keeps an outcome until the last has asked."""

    def __init__(self, planned: Iterable[Run], faults: Iterable[Run]) -> None:
        """Begin with the faults. `planned`: what will be asked for, in order, each time; `faults` are some of them."""
        uses = list(planned)
        self._uses = Counter(uses)
        self._order = list(dict.fromkeys(uses))
        self._outcomes: dict[Run, Outcome] = {}
        self._ahead: tuple[Run, Step] | None = None
        self.engine = Engine(preload=PRELOAD)
        self._elsewhere = Elsewhere(run for run in self._order if run in set(faults))

    def outcome(self, run: Run, *, alone: bool) -> Outcome:
        """Return what a run brought back, and have the ranks begin what will be asked for next.

        Unless `alone`: the caller has more to run before it asks for the next outcome.
        """
        if run not in self._outcomes:
            self._outcomes[run] = self._elsewhere.outcome(run) if run in self._elsewhere else self._here(run, alone)
        if alone:
            self.settle()
        self._uses[run] -= 1
        return self._outcomes[run] if self._uses[run] > 0 else self._outcomes.pop(run)

    def renew(self, world: int) -> None:
        """End the ranks of that many, but for what they have begun."""
        self.settle()
        self.engine.renew(world)

    def settle(self) -> None:
        """Wait for what was begun ahead."""
        if self._ahead is not None:
            (run, step), self._ahead = self._ahead, None
            self._outcomes[run] = step.outcome()

    def close(self) -> None:
        """End all ranks."""
        self._elsewhere.close()
        self.engine.close()

    def _here(self, run: Run, alone: bool) -> Outcome:
        if self._ahead is not None and self._ahead[0] == run:
            (_, step), self._ahead = self._ahead, None
        else:
            self.settle()
            step = self._start(run)
        following = None if alone else self._next(run)
        if following is not None:  # before this outcome is read: the ranks need not wait for that
            self._ahead = following, self._start(following)
        return step.outcome()

    def _start(self, run: Run) -> Step:
        return start(self.engine, run.backend, run.drawn(), DEADLINE_S)

    def _next(self, run: Run) -> Run | None:
        """Return what will have to run here next."""
        following = self._order[self._order.index(run) + 1 :] if run in self._order else []
        return next((each for each in following if each not in self._outcomes and each not in self._elsewhere), None)


class Elsewhere:
    """Runs on ranks of their own, by a thread, one after the other while its owner does other things."""

    def __init__(self, runs: Iterable[Run]) -> None:
        """Begin with the first."""
        self._engine: Engine | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._runs: dict[Run, Future[Outcome]] = {run: self._thread.submit(self._run, run) for run in runs}

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    def outcome(self, run: Run) -> Outcome:
        """Wait for a run, and return what it brought back."""
        return self._runs[run].result()

    def close(self) -> None:
        """End with the run that is under way."""
        self._thread.shutdown(cancel_futures=True)
        if self._engine is not None:
            self._engine.close()

    def _run(self, run: Run) -> Outcome:
        if self._engine is None:
            self._engine = Engine(preload=PRELOAD)
        return moe_step(self._engine, run.backend, run.drawn(), DEADLINE_S)
