"""The stored selection holds what it must, of every backend that has one (docs/decisions/0010).

Where one of these fails, run the tool again that its message names: it adds what is missing, in seconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
import torch

from moe_conformance import waiving
from moe_conformance.backends import registry
from moe_conformance.backends.native import Native
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch
from moe_conformance.workloads.selection import power
from moe_conformance.workloads.selection import stored as selections
from moe_conformance.workloads.selection.shards import Shard
from moe_conformance.workloads.selection.stored import FOLDER, of, read
from self_tests.checked_runs import EXPECTED
from self_tests.workloads.second_cases import alone, declared, expectations, second
from tools.power import SMOKE_S, Matrix, quick_plants
from tools.select_cases import Demand, Place, choose, demands, place_of

STORED = sorted(path.stem for path in FOLDER.glob("*.toml"))
AGAIN = "run `python -m tools.select_cases {}` and look at what it changes"
POWER = "run `python -m tools.power`"
SECOND = "run `python -m tools.second_cases`, then `python -m tools.select_cases native`"


@cache
def plan_of(backend: str) -> Plan:
    """Return the quick plan of a backend; its library need not be there."""
    return Plan(registry.load(backend), "cpu", "quick")


@cache
def demands_of(backend: str) -> dict[Place, set[Demand]]:
    """Return what each case of a backend's pool meets."""
    return demands(plan_of(backend))


def stored(backend: str) -> set[Place]:
    """Return the cases that are stored."""
    tables = read(backend)
    return {(v, layout, name) for v, names in tables.items() for name, layouts in names.items() for layout in layouts}


def selected(backend: str) -> set[Place]:
    """Return the cases that are selected: stored, or of a workload that native's file alone mentions."""
    selection = of(backend, plan_of(backend).backend.variants)
    return {place for place in demands_of(backend) if selection.holds(*place)}


def met(backend: str, places: Iterable[Place]) -> set[Demand]:
    """Return all that cases meet together."""
    return {demand for place in places for demand in demands_of(backend)[place]}


@pytest.mark.parametrize("backend", STORED)
class TestStored:
    def test_every_case_exists(self, backend: str) -> None:
        """A case that is gone, or whose name is another now, is not kept."""
        assert set() == stored(backend) - demands_of(backend).keys(), AGAIN.format(backend)

    def test_every_demand_is_met(self, backend: str) -> None:
        """What some case of the pool meets, a selected one does: workloads, checks on variants and layouts, traits."""
        missing = met(backend, demands_of(backend)) - met(backend, selected(backend))
        assert [] == sorted(missing, key=str), AGAIN.format(backend)

    def test_it_is_a_part(self, backend: str) -> None:
        """Less than half of the pool runs: else nothing is selected."""
        assert 0 < 2 * len(plan_of(backend).cases) < len(plan_of(backend).pool)

    def test_examples_of_waivers_run(self, backend: str) -> None:
        """Those of the quick layouts, be they stored or not."""
        path = waiving.path_for(backend, "")
        names = [each["example"] for each in tomllib.loads(path.read_text())["waiver"]] if path else []
        examples = frozenset(name.partition("[")[2].removesuffix("]") for name in names)
        asked = examples & {case.id for case in plan_of(backend).pool}
        run = Plan(registry.load(backend), "cpu", "quick", kept=examples)
        assert set() == asked - {case.id for case in run.cases}
        assert bool(asked) == bool(path)


class TestPlants:
    def test_the_case_that_a_plant_names_is_selected(self) -> None:
        """Each workload of the quick profile that a plant names runs with its variant on its layout."""
        quick = {place_of(case) for case in plan_of("native").pool}
        unseen = {name: place for name, place in declared().items() if place in quick - stored("native")}
        assert {} == unseen, AGAIN.format("native")
        worlds = {plant.layout.world for plant, expected in EXPECTED if not expected.workload}
        assert worlds <= {*plan_of("native").worlds}

    def test_every_plant_has_a_second_case(self) -> None:
        """It is another than its own, and selected; or the file says that none was found."""
        assert set() == expectations().keys() - second().keys() - alone().keys(), SECOND
        assert {} == {name: place for name, place in second().items() if place not in stored("native")}, SECOND
        assert [] == [name for name, place in second().items() if place == declared().get(name)]

    def test_no_second_case_is_of_a_plant_that_is_gone(self) -> None:
        """The file names expectations that there are, each once."""
        assert set() == (second().keys() | alone().keys()) - expectations().keys(), SECOND
        assert set() == second().keys() & alone().keys()


def drawn(batch: Batch) -> list[list[float]]:
    """Return the tokens of a batch, 0 for those that are no number, which equal nothing."""
    return batch.x_TD.nan_to_num().tolist()


class TestPower:
    def test_every_case_of_the_order_runs(self) -> None:
        """Each is selected, and comes once."""
        order = power.read().order
        assert set() == set(order) - stored("native"), POWER
        assert len(order) == len(set(order))

    def test_the_order_is_that_of_the_matrix(self) -> None:
        """What is stored follows from what was measured: the order, and how much of it the profile smoke runs."""
        matrix = Matrix.read()
        assert matrix.order() == list(power.read().order), POWER
        assert matrix.within(matrix.order(), SMOKE_S) == power.read().smoke, POWER

    def test_the_stored_share_is_that_of_the_matrix(self) -> None:
        """Of what the quick profile detects, the cases of the profile smoke detect as much as is told."""
        matrix, known = Matrix.read(), power.read()
        assert (len(matrix.detected), matrix.share(known.order[: known.smoke])) == (known.plants, known.detected), POWER
        assert matrix.share(known.order) == known.plants

    def test_every_plant_is_in_the_matrix(self) -> None:
        """Some case of the order detects each."""
        assert set() == quick_plants().keys() - Matrix.read().detected.keys(), POWER

    def test_smoke_is_the_first_part_of_quick(self) -> None:
        """Its cases are the first of the order, which is that of the quick profile, and nothing else runs."""
        plan = Plan(Native(), "cpu", "smoke")
        numbers = plan_of("native").power
        assert list(range(power.read().smoke)) == sorted(numbers[place_of(case)] for case in plan.cases)
        assert () == plan.drawing(ExchangeStep())
        assert () == plan.worlds

    def test_what_runs_in_smoke_is_what_runs_in_quick(self) -> None:
        """The same batches, although less is drawn."""
        of_quick = {case.id: case.workload for case in plan_of("native").cases}
        for case in Plan(Native(), "cpu", "smoke").cases[::10]:
            expected, found = of_quick[case.id], case.workload
            assert (expected.config, expected.layout, expected.schedule) == (found.config, found.layout, found.schedule)
            for ours, others in zip(expected.batches, found.batches, strict=True):
                assert [drawn(each) for each in ours] == [drawn(each) for each in others]

    def test_another_backend_runs_the_same_with_its_first_variant(self) -> None:
        """Whatever native's variant is, layouts and workloads come in the same order."""
        numbers = power.numbers(Adopted.variants)
        assert {"mine"} == {variant for variant, _, _ in numbers}
        expected = list(dict.fromkeys(place[1:] for place in power.read().order))
        assert expected == [place[1:] for place in sorted(numbers, key=numbers.__getitem__)]


class TestRotation:
    def test_parts_and_the_selection_are_the_pool(self) -> None:
        """Nothing runs twice, and nothing is never run."""
        parts = [Plan(Native(), "cpu", "quick", rotation=Shard(index, 3)).cases for index in (1, 2, 3)]
        ids = sorted(case.id for part in (*parts, plan_of("native").cases) for case in part)
        assert sorted(case.id for case in plan_of("native").pool) == ids
        assert min(map(len, parts)) > 0.9 * max(map(len, parts))

    def test_it_has_cases_alone(self) -> None:
        """Hypothesis draws in the quick profile itself, and groups are asked for there."""
        plan = Plan(Native(), "cpu", "quick", rotation=Shard(1, 3))
        assert () == plan.drawing(ExchangeStep())
        assert () == plan.worlds


class TestUnmentioned:
    def test_a_workload_that_a_file_does_not_mention_runs_as_without_a_file(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing has to be selected for a library when a workload comes to native's file; what is there stays."""
        tables = read("transformers")
        without = {variant: {name: row[name] for name in row if name != "even"} for variant, row in tables.items()}
        monkeypatch.setattr(selections, "read", lambda name: without if name == "transformers" else read(name))
        variants = list(tables)
        found, expected = of("transformers", variants).layouts, of("adopted", variants).layouts
        assert [expected[each].get("even") for each in variants] == [found[each].get("even") for each in variants]
        mentioned = next(name for name in tables[variants[0]] if name != "even")
        assert tables[variants[0]][mentioned] == found[variants[0]][mentioned]


class Adopted(Native):
    """A backend that has no selection of its own."""

    name = "adopted"
    variants = ("mine", "other")
    sampled = ()


@cache
def cases_of_adopter(variant: str) -> list[Case]:
    """Return what it runs with a variant."""
    return [case for case in plan_of(f"{__name__}:Adopted").cases if case.cell.variant == variant]


class TestOthers:
    def test_planted_bugs_run_what_native_runs(self) -> None:
        """A backend with native's variants has native's selection, whatever its name, but no rows of pairs."""
        assert replace(of("native", Native.variants), own=frozenset()) == of("native-with-a-bug", Native.variants)

    def test_an_adopter_runs_what_native_does(self) -> None:
        """The first variant what native's first does, every other what native does with any but its first."""
        rotating = {case.workload.name for case in plan_of("native").pool if case.workload.rotates}
        own = {place for place in stored("native") if place[2] not in rotating}
        for variant, of_native in (("mine", True), ("other", False)):
            expected = {place[1:] for place in own if (place[0] == "alltoall") == of_native}
            run = {place_of(case)[1:] for case in cases_of_adopter(variant)}
            in_bfloat16 = {place_of(case)[1:] for case in self.in_bfloat16(variant)}
            assert expected | in_bfloat16 == run

    def test_an_adopter_runs_all_that_is_in_bfloat16(self) -> None:
        """Many kernels take nothing else."""
        for variant in Adopted.variants:
            pool = [case for case in plan_of(f"{__name__}:Adopted").pool if case.cell.variant == variant]
            fixed = [case for case in pool if not case.workload.rotates]
            expected = [case.id for case in fixed if case.workload.config.dtype == torch.bfloat16]
            assert expected == [case.id for case in self.in_bfloat16(variant)]
            assert len(expected) > 100

    def in_bfloat16(self, variant: str) -> list[Case]:
        """Return the cases of an adopter's variant that are in bfloat16."""
        return [case for case in cases_of_adopter(variant) if case.workload.config.dtype == torch.bfloat16]

    def test_a_new_workload_runs(self) -> None:
        """What nobody has decided about runs wherever it can."""
        pool = plan_of("native").pool
        case = next(case for case in pool if not plan_of("native").selected(case))
        new = replace(case, workload=replace(case.workload, name="written-today"))
        assert plan_of("native").selected(new)
        assert not of("native", Native.variants).holds("alltoall", "of-no-layout", "even")
        assert not of("adopted", Adopted.variants).holds("other", "of-no-layout", "even")


class TestChoice:
    def test_the_cheapest_that_meets_most_comes_first(self) -> None:
        """What two cheap cases meet, a dear one is not chosen for; what is given stays, and makes others needless."""
        a, b, c = places = [("v", "l", name) for name in "abc"]
        meets: dict[Place, set[Demand]] = {a: {("1",), ("2",)}, b: {("1",)}, c: {("2",)}}
        assert {a} == choose(meets, dict.fromkeys(places, 1.0), [], [])
        assert {b, c} == choose(meets, {a: 9.0, b: 1.0, c: 1.0}, [], [])
        assert {a} == choose(meets, {a: 9.0, b: 1.0, c: 1.0}, [a], [])
        assert {b, c} == choose(meets, dict.fromkeys(places, 1.0), [b], [c])
