"""Every check that reads a case, and its verdict on an outcome of it, as a run reports it before waivers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from moe_conformance.judging.shared.equivalence.runs import RunTwins
from moe_conformance.plugin import collecting
from moe_conformance.plugin.outcomes import Kept
from moe_conformance.plugin.trial import Trial, ending
from moe_conformance.reproducing.examining import refusal_by_limit, refusal_of
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec.row import ARGUMENTS
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.runs import RunSpec
from moe_conformance.workloads.records.workload import Workload


@dataclass(frozen=True)
class Check:
    """A check of distributed_tests that reads cases."""

    name: str  # test_file:TestClass.test_name
    function: Callable[..., None]  # bound
    requirements: tuple[str, ...]
    run: RunSpec
    when: Callable[[Workload], bool] | None

    @property
    def arguments(self) -> frozenset[str]:
        """The names of its arguments."""
        return frozenset(inspect.signature(self.function).parameters)

    def reads(self, workload: Workload) -> bool:
        """Whether it judges this workload."""
        return self.run == workload.run and (self.when is None or self.when(workload))


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
def checks() -> tuple[Check, ...]:
    """Return all checks that read cases, in the order of their files."""
    found: list[Check] = []
    for path in sorted(collecting.FOLDER.glob("test_*.py")):
        module = importlib.import_module(f"{collecting.PACKAGE}.{path.stem}")
        for name, function in _functions(module):
            for mark in (mark for mark in getattr(function, "pytestmark", ()) if mark.name == "requirement"):
                given = mark.kwargs
                found.append(Check(f"{path.stem}:{name}", function, tuple(mark.args), given["run"], given["when"]))
    return tuple(check for check in found if check.arguments <= ARGUMENTS and check.arguments - {"tally"})


def find(plan: Plan, variant: str, layout: str, workload: str) -> Case | None:
    """Return the case of these names in a plan, selected or not; None if there is none."""
    runs = dict.fromkeys(check.run for check in checks())
    found = (plan.find(run, variant, layout, workload) for run in runs)
    return next((case for case in found if case is not None), None)


def verdicts(case: Case, outcome: Outcome, twins: RunTwins) -> dict[str, Verdict]:
    """Return the verdict of every check that reads the case, by the check's name."""
    kept = Kept(case, outcome)
    return {check.name: _verdict(check, kept, twins) for check in checks() if check.reads(case.workload)}


def _verdict(check: Check, kept: Kept, twins: RunTwins) -> Verdict:
    assert kept.case is not None
    trial = Trial(check.requirements, check.name, kept.case.cell, kept.case.workload, outcome=kept.outcome)
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


def _functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield test functions with their names, those of classes bound."""
    for name, value in list(vars(module).items()):
        if inspect.isclass(value) and name.startswith("Test"):
            instance = value()
            yield from ((f"{name}.{each}", getattr(instance, each)) for each in vars(value) if each.startswith("test_"))
        elif inspect.isfunction(value) and name.startswith("test_"):
            yield name, value
