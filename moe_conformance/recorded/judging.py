"""Every check that reads a case, and its verdict on an outcome of it, as a run reports it before waivers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from moe_conformance.judging.shared.equivalence.runs import RunTwins
from moe_conformance.plugin.outcomes import Kept
from moe_conformance.plugin.trial import Trial, ending
from moe_conformance.reproducing.examining import refusal_by_limit, refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec.checks import Check, checks
from moe_conformance.workloads.plan import Case, Plan


@dataclass(frozen=True)
class Verdict:
    """The verdict of a check on an outcome."""

    verdict: str  # pass, fail, crash, hang, vacuous, refused, not adapted, error
    kind: str | None = None
    stage: str | None = None
    elements: int = 0  # compared, as are pairs
    pairs: int = 0
    message: str = ""

    @property
    def judged(self) -> tuple[object, ...]:
        """What a change of judging must not change unseen."""
        return self.verdict, self.kind, self.stage, self.elements, self.pairs


@cache
def readers() -> tuple[Check, ...]:
    """Return all checks that read cases, in the order of their files."""
    return tuple(check for check in checks() if check.of_cases)


def find(plan: Plan, variant: str, layout: str, workload: str) -> Case | None:
    """Return the case of these names in a plan, selected or not; None if there is none."""
    runs = dict.fromkeys(check.run for check in readers())
    found = (plan.find(run, variant, layout, workload) for run in runs)
    return next((case for case in found if case is not None), None)


def verdicts(case: Case, outcome: Outcome, twins: RunTwins) -> dict[str, Verdict]:
    """Return the verdict of every check that reads the case, by the check's name."""
    kept = Kept(case, outcome)
    return {check.path: _verdict(check, kept, twins) for check in readers() if check.reads(case.workload)}


def _verdict(check: Check, kept: Kept, twins: RunTwins) -> Verdict:
    assert kept.case is not None
    trial = Trial(check.requirements, check.path, kept.case.cell, kept.case.workload, outcome=kept.outcome)
    offered: dict[str, Callable[[], Any]] = {
        "outcome": lambda: kept.outcome,
        "reading": lambda: kept.reading,
        "tally": lambda: trial.tally,
        "twins": lambda: twins,
    }
    error: BaseException | None = None
    try:
        if refusal := refusal_of(kept.outcome) or refusal_by_limit(kept.case, kept.outcome):
            trial.skip(*refusal)
        check.function(**{name: offered[name]() for name in check.arguments})
    except (Exception, pytest.skip.Exception) as raised:
        error = raised
    ended, tally = ending(trial, error), trial.tally
    return Verdict(ended.verdict, ended.kind, ended.stage, tally.elements, tally.pairs, ended.message)
