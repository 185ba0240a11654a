"""What the quick profile leaves out: no check, no layout of one, no planted bug (docs/decisions/0008)."""

from __future__ import annotations

from functools import cache

import pytest

from moe_conformance.backends import registry
from moe_conformance.backends.native import Native
from moe_conformance.judging.verdict import Mismatch
from moe_conformance.plan import Case, Plan
from moe_conformance.topology import Layout
from moe_conformance.workloads import corpus, profiles, routing
from moe_conformance.workloads.features import broken
from moe_conformance.workloads.records import Workload
from self_tests.checks import checks
from self_tests.planted_bugs import Expectation, Plant
from self_tests.test_planted_bugs import TRIALS, Court, court, variant_for

__all__ = ["court"]  # a fixture


@cache
def plan_of_native() -> Plan:
    """Return the plan whose cases all tests look at."""
    return Plan(Native(), "cpu", "quick")


@cache
def readers(layout: Layout) -> list[tuple[Workload, frozenset[str]]]:
    """Return what takes turns on a layout, all of it, and the checks that read each; the variant does not matter."""
    drawn = (*corpus.corpus("alltoall", layout, "quick"), *routing.routing_corpus("alltoall", layout))
    every = [check for some in checks().values() for check in some]
    return [(each, frozenset(check.function.__name__ for check in every if check.reads(each))) for each in drawn]


class TestChecks:
    # DeepEP's kernels run on GPUs alone.
    @pytest.mark.parametrize("name", sorted({*registry.names()} - {"deep-ep"}))
    def test_every_check_meets_every_layout(self, name: str) -> None:
        """A check that could read a workload that takes turns reads one on every layout, of those within the limits."""
        backend = registry.load(name)
        plan = Plan(backend, "cpu", "quick")
        met = 0
        for cell in plan.cells:
            if cell.layout not in profiles.quick_layouts() or cell.variant in getattr(backend, "sampled", ()):
                continue
            kinds = ("probe", "experts", "route") if cell.variant == backend.variants[0] else ("probe", "experts")
            every = [(each, read) for each, read in readers(cell.layout) if each.kind in kinds]
            within = [(each.name, read) for each, read in every if not broken(cell.limits, each, "cpu")]
            found = {case.workload.name for case in plan.cases if case.cell == cell}
            asked = {check for _, read in within for check in read}
            assert set() == asked - {check for name, read in within if name in found for check in read}, cell.id
            met += len(asked)
        assert met > 0


class TestPlants:
    def test_what_convicts_a_plant_is_there(self) -> None:
        """Each workload that a plant names is on its layout; variants that are sampled have a test of their own."""
        places = {(case.cell.variant, case.cell.layout, case.workload.name) for case in plan_of_native().cases}
        unseen = [
            (plant.name, expected.workload)
            for plant, expected in TRIALS
            if expected.workload
            and variant_for(plant, expected) not in Native.sampled
            and (variant_for(plant, expected), plant.layout, expected.workload) not in places
        ]
        assert [] == unseen
        assert {plant.layout.world for plant, expected in TRIALS if not expected.workload} <= {*plan_of_native().worlds}

    def test_what_sampled_variants_run_convicts_their_plants(self, court: Court) -> None:
        """Of the workloads that such a variant is left with, one at least shows each plant."""
        trials = [(p, e) for p, e in TRIALS if variant_for(p, e) in Native.sampled]
        assert [] == [(p.name, e.requirement) for p, e in trials if not self.is_convicted(court, p, e)]
        assert {p.variant for p, _ in trials} == {*Native.sampled}

    def is_convicted(self, court: Court, plant: Plant, expected: Expectation) -> bool:
        """Return whether the requirement is found broken in any case of the plant's variant, one case at a time."""
        asked = checks()[expected.requirement]
        return any(
            isinstance(verdict, Mismatch)
            for case in plan_of_native().cases
            if case.cell.variant == plant.variant and any(check.reads(case.workload) for check in asked)
            for verdict in court.verdicts(plant.backend, expected.requirement, *self.place(case))
        )

    def place(self, case: Case) -> tuple[str, Layout, str]:
        """Return the variant, the layout and the name."""
        return case.cell.variant, case.cell.layout, case.workload.name
