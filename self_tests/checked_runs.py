"""Backends run on ranks, with the verdicts of the checks of one requirement on one workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from moe_conformance.backends import registry
from moe_conformance.backends.native import Native
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.scenarios.group_lists import group_lists
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.spec.checks import Check, by_requirement
from moe_conformance.workloads import group_sizes as sizes
from moe_conformance.workloads import scripts
from moe_conformance.workloads.records.workload import Wish
from self_tests.checks import judge
from self_tests.planted_bugs import Expectation, Plant, plants
from self_tests.trial_runs import DEADLINE_S, Run, Runs

NATIVE = "native"
ONCE = {name for chapter in scripts.chapters() if chapter.variants == "first" for name in chapter.names}


def variant_for(plant: Plant, expected: Expectation) -> str:
    """Return the variant with which a plant is tried: the suite asks no other for what variants have in common."""
    return Native.variants[0] if expected.workload in ONCE else plant.variant


@dataclass(frozen=True)
class CheckedRuns:
    """Runs backends on ranks and calls the checks on the outcomes."""

    runs: Runs

    def verdicts(
        self, backend: str, requirement: str, variant: str, layout: Layout, workload: str
    ) -> list[Mismatch | Tally]:
        """Return what every check of a requirement makes of a run."""
        if not workload:
            return self._of_groups(by_requirement()[requirement], backend, layout)
        run = Run(backend, variant, layout, workload)
        asked = readers(requirement, run)
        outcome = self.runs.outcome(run, alone=run_more(asked))
        step = partial(moe_step, self.runs.engine, backend, deadline_s=DEADLINE_S)
        twins = Twins(registry.load(backend), "cpu", lambda some: [step(each) for each in some], self.runs.renew)
        return [judge(check, outcome=outcome, twins=twins) for check in asked]

    def check_passes(self, backend: str, requirement: str, variant: str, layout: Layout, workload: str) -> None:
        """Require that every check of a requirement holds of a run, that there is one, that it compared."""
        verdicts = self.verdicts(backend, requirement, variant, layout, workload)
        assert verdicts, f"no check of {requirement} reads {workload}"
        for verdict in verdicts:
            assert isinstance(verdict, Tally), verdict
            assert not verdict.vacuous

    def _of_groups(self, asked: Sequence[Check], backend: str, layout: Layout) -> list[Mismatch | Tally]:
        """Nothing runs: the backend is only asked which groups it would build."""
        world = layout.world
        wishes = tuple(Wish(each) for each in (*sizes.possible(world), *sizes.impossible(world)))
        self.runs.settle()
        told = dict(zip(wishes, group_lists(self.runs.engine, backend, wishes), strict=True))
        lists = {layout: told[Wish(layout)].lists}
        return [judge(check, group_lists=lists, group_answers=told, size_answers=told) for check in asked]


EXPECTED = [(plant, expected) for plant in plants() for expected in plant.expects]


def readers(requirement: str, run: Run) -> list[Check]:
    """Return the checks of a requirement that read a run."""
    return [check for check in by_requirement()[requirement] if check.reads(run.drawn())]


def run_more(asked: Sequence[Check]) -> bool:
    """Whether checks run twins of what they are given."""
    return any("twins" in check.arguments for check in asked)


def faults() -> set[Run]:
    """Return the runs of plants that hang or end ranks, but for those whose twins follow on the same ranks."""
    expectations = [(e, Run(p.backend, variant_for(p, e), p.layout, e.workload)) for p, e in EXPECTED if e.workload]
    followed = {run for expected, run in expectations if run_more(readers(expected.requirement, run))}
    return {run for expected, run in expectations if "run" == expected.stage} - followed


def planned(item: pytest.Item) -> Run | None:
    """Return what a test will have run, if that can be told from its parameters."""
    given: dict[str, Any] = {}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        given = item.callspec.params
    if {"plant", "expected"} <= given.keys():
        plant, expected = given["plant"], given["expected"]
        run = Run(plant.backend, variant_for(plant, expected), plant.layout, expected.workload)
    elif {"requirement", "variant", "layout", "workload"} <= given.keys():
        run = Run(NATIVE, given["variant"], given["layout"], given["workload"])
    else:
        return None
    return run if run.workload else None  # else groups are only asked for


def opened(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """Yield the ranks for all tests of a module: what a fixture of that scope does."""
    items = [item for item in request.session.items if item.path == request.path]
    runs = Runs((run for item in items if (run := planned(item))), faults())
    yield CheckedRuns(runs)
    runs.close()
