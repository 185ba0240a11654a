"""How Hypothesis draws in a run: the same batches every time, so that two runs give the same verdicts.

A search draws batches, runs them on the ranks and judges their outcomes. Then it draws a batch of every feature that
the limits allow and that no batch had. What was drawn is counted in the item's trial.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis.errors import HypothesisWarning, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plugin.trial import Trial
from moe_conformance.reproducing.examining import refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.drawn.distribution import Feature
from moe_conformance.workloads.drawn.example import to_json
from moe_conformance.workloads.records.workload import Workload

NAME = "moe-conformance"

_EXAMPLES = {"quick": 12, "full": 100, "virtual": 12, "smoke": 12}
_DEADLINE_S, _DEADLINE_AFTER_A_HANG_S = 60.0, 10.0
_MOST_BREAKDOWNS = 25  # runs that ended in a crash or a hang, after which shrinking has to do with what it has
MOST_REFUSED = 60  # runs before the first that the backend builds: one that refuses so many refuses all

Judge = Callable[[Outcome], None]
Drive = Callable[[SearchStrategy[Workload], Judge], None]


def load_profile(profile: str) -> None:
    """Make the profile the default of this process.

    Examples of an item share its fixtures on purpose. There is no deadline, since the first run on a layout starts its
    ranks.
    """
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    settings.register_profile(
        NAME,
        max_examples=_EXAMPLES[profile],
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile(NAME)


@dataclass
class Search:
    """A search for a batch that fails, in one cell."""

    trial: Trial
    required: Sequence[Feature]  # what the drawn batches must have had, each at least once
    left_out: Sequence[Feature]  # what none of them is to have
    step: Callable[[Workload, float], Outcome]  # runs on the ranks, with a deadline in seconds
    seed: str
    hung: bool = False  # once, which may repeat while shrinking
    broken_down: set[str] = field(default_factory=set)  # workloads that ended in a crash or a hang
    refusals: int = 0  # runs that the backend refused

    def hold(self, workloads: SearchStrategy[Workload], judge: Judge) -> None:
        """Judge what Hypothesis draws, then one batch of every feature that it left out.

        Raises:
            Unsatisfiable: the backend refused everything; the trial says why.
            Mismatch: the judge's, on the smallest batch; a group of them if there are several kinds.
        """
        self.trial.drawn.update({"batches": 0} | {feature.name: 0 for feature in self.required})
        self.trial.judge = judge
        if self.left_out:
            workloads = workloads.filter(lambda workload: not any(feature.has(workload) for feature in self.left_out))
        self._draw(workloads, judge)
        for feature in self.required:
            if not self._settled(feature):
                with suppress(Unsatisfiable):
                    self._draw(workloads.filter(feature.has), judge, examples=1)
        for feature in self.required:
            if feature.refusable and not self.trial.drawn[feature.name] and feature.name in self.trial.refused:
                del self.trial.drawn[feature.name]  # the limits allow it, and the backend refuses to build it

    def _settled(self, feature: Feature) -> bool:
        """Whether a batch with the feature was drawn, or the backend refused one that may be refused."""
        refused = feature.refusable and feature.name in self.trial.refused
        return bool(self.trial.drawn[feature.name]) or refused

    def _draw(self, workloads: SearchStrategy[Workload], judge: Judge, examples: int | None = None) -> None:
        @seed(zlib.crc32(self.seed.encode()))
        @given(workload=workloads)
        def holds(workload: Workload) -> None:
            if self._refuses_all:
                reject()
            if not self._worth_a_run(workload):
                return
            outcome = self._run(workload)
            try:
                judge(outcome)
            except Mismatch as mismatch:
                mismatch.outcome = outcome
                raise

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)  # it shows a batch in full, and thinks that is long
            (holds if examples is None else settings(max_examples=examples)(holds))()

    @property
    def _refuses_all(self) -> bool:
        """Whether the backend refused the first MOST_REFUSED runs: then no more is run."""
        return self.refusals >= MOST_REFUSED and not self.trial.drawn["batches"]

    def _worth_a_run(self, workload: Workload) -> bool:
        """Whether to run a workload: a breakdown costs new ranks, so their number is limited.

        A workload that broke down is run again whenever Hypothesis draws it, as it does before it reports it.
        """
        return len(self.broken_down) < _MOST_BREAKDOWNS or _key(workload) in self.broken_down

    def _run(self, workload: Workload) -> Outcome:
        """Run a drawn workload and count what it has; reject it if the backend refuses it."""
        trial = self.trial
        outcome = trial.outcome = self.step(workload, _DEADLINE_AFTER_A_HANG_S if self.hung else _DEADLINE_S)
        self.hung |= any(rank.status == "hung" for rank in outcome.ranks)
        if outcome.blamed:
            self.broken_down.add(_key(workload))
        found = [feature.name for feature in self.required if feature.has(workload)]
        if refusal := refusal_of(outcome):
            trial.settled, trial.rejected = refusal
            trial.refused.update(found)
            self.refusals += 1
            reject()
        for name in ("batches", *found):
            trial.drawn[name] += 1
        return outcome


def _key(workload: Workload) -> str:
    """Return a key that only equal workloads share."""
    return json.dumps(to_json(workload))
