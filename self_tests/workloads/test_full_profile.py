"""The full profile runs each workload with each variant on a layout of each number of ranks (docs/decisions/0009)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from moe_conformance.backends.native import Native
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.features import cell_limits
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep, RouterStep
from moe_conformance.workloads.records.workload import Drawn, Workload
from moe_conformance.workloads.selection import turns
from moe_conformance.workloads.selection.stored import read

STEPS = (ExchangeStep, ExpertsStep, RouterStep, LayerStep)


@cache
def plan() -> Plan:
    """Return the plan of native, whose pool takes seconds to draw."""
    return Plan(Native(), "cpu", "full")


def stands_for(case: Case) -> str:
    """Return what takes turns with what: variants that are sampled, with each other."""
    return "sampled" if case.cell.variant in Native.sampled else case.cell.variant


def tokens(workload: Workload) -> Sequence[Sequence[int]]:
    """Return T of every microbatch and rank."""
    batches = workload.batches
    return batches.tokens if isinstance(batches, Drawn) else [[len(each.x_TD) for each in ranks] for ranks in batches]


class TestFullProfile:
    def test_every_workload_runs_on_each_number_of_ranks(self) -> None:
        """With each variant, or one of those that are sampled, wherever the workload can run at all."""
        pool = {(stands_for(case), case.workload.name, case.cell.layout.world) for case in plan().pool}
        assert pool == {(stands_for(case), case.workload.name, case.cell.layout.world) for case in plan().cases}

    def test_it_holds_the_quick_profile(self) -> None:
        """What is stored for the quick profile runs in the full one."""
        run = {(case.cell.variant, case.cell.layout.name, case.workload.name) for case in plan().cases}
        stored = {(v, at, name) for v, names in read("native").items() for name, ats in names.items() for at in ats}
        assert set() == stored - run

    def test_every_step_has_a_token(self) -> None:
        """A step in which no rank ever has any would compare nothing, and be a failure of whoever is right."""
        steps = [w for w in (case.workload for case in plan().cases) if isinstance(w.run, STEPS)]
        assert steps
        assert [] == [w.name for w in steps if not any(map(any, tokens(w)))]

    def test_it_is_a_part(self) -> None:
        """Less than a fourth of the pool runs; of cells that refuse everything, all of what is left of it."""
        assert 0 < 4 * len(plan().cases) < len(plan().pool)
        refused = [case for case in plan().pool if cell_limits(case.cell.limits, case.cell.layout)]
        assert {case.id for case in refused} <= {case.id for case in plan().cases}
        assert refused

    def test_variants_run_a_workload_on_different_layouts(self) -> None:
        """What is wrong on one layout of four ranks is met with some variant by most workloads."""
        found: dict[str, set[str]] = defaultdict(set)
        for case in plan().cases:
            if case.cell.layout.world == 4 and not case.workload.rotates:
                found[case.workload.name].add(case.cell.layout.name)
        assert 3 <= sorted(map(len, found.values()))[len(found) // 2]


class TestTurns:
    def test_a_workload_runs_in_one_of_the_cells_that_have_it(self) -> None:
        """In the next of these with the next variant, and nowhere else."""
        none: turns.Marks = frozenset()
        cells = [{"a": none, "b": none}, {"a": none}, {"a": none, "b": none}]
        runs = [turns.taken(cells, variant) for variant in range(3)]
        assert all(sum("a" in cell for cell in each) == 1 for each in runs)
        assert [True] * 3 == [any("a" in each[cell] for each in runs) for cell in range(3)]
        assert {0, 2} == {index for each in runs for index, cell in enumerate(each) if "b" in cell}

    def test_a_workload_goes_where_it_shows_something_new(self) -> None:
        """Also where more runs than elsewhere."""
        cells = [{"a": frozenset("x"), "b": frozenset("y"), "c": frozenset("x")}, {"c": frozenset("z")}]
        assert [{"a", "b"}, {"c"}] == turns.taken(cells, 0)

    def test_every_cell_shows_each_mark_that_it_can(self) -> None:
        """A workload that shows it runs in two cells then."""
        cells = [{"a": frozenset("x")}, {"a": frozenset("x")}]
        assert [{"a"}, {"a"}] == turns.taken(cells, 0)

    def test_a_lot_is_one_of_the_parts(self) -> None:
        """Each part gets some."""
        assert {1, 2, 3} == {turns.lot(f"case-{number}", 3) for number in range(30)}
