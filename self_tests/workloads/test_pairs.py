"""Pairs of options: what is declared is read from workloads, every possible pair has one, and every case is reached."""

from __future__ import annotations

from functools import cache

import pytest

from moe_conformance.backends.native import Native
from moe_conformance.workloads import scripts
from moe_conformance.workloads.pairs.cases import Table, layout_of, layouts, tables
from moe_conformance.workloads.pairs.measure import Found, described, lines, measured
from moe_conformance.workloads.pairs.options import Option, Rule, Surface
from moe_conformance.workloads.plan import Plan
from moe_conformance.workloads.selection.profiles import beside, full_layouts, quick_layouts

AGAIN = "run `python -m tools.cover_pairs {}`, which adds workloads for them"


@cache
def plan() -> Plan:
    """The quick plan of native."""
    return Plan(Native(), "cpu", "quick")


@cache
def found() -> dict[str, Found]:
    """What the quick profile and its rotation meet, by surface."""
    return {each.surface.name: each for each in measured(plan())}


def toy(*rules: Rule) -> Surface:
    """A surface of three options, of which no workload is made."""
    options = tuple(Option(name, {"no": "", "yes": ""}, lambda workload: "") for name in "abc")
    return Surface("toy", (), options, rules, lambda name, row, layout: None)


class TestTables:
    @pytest.mark.parametrize("table", tables(), ids=lambda table: table.surface.name)
    def test_every_possible_pair_is_met(self, table: Table) -> None:
        """By a workload that the quick profile runs, or that the rotation does."""
        name = table.surface.name
        assert [] == sorted(map(sorted, found()[name].missing)), AGAIN.format(name)

    @pytest.mark.parametrize("table", tables(), ids=lambda table: table.surface.name)
    def test_stored_rows_are_what_their_workloads_have(self, table: Table) -> None:
        """Each has a value of every option, no rule bars it, and the workload made of it has these values."""
        for name, row in table.rows.items():
            workload = table.surface.make(name, row, layouts()[layout_of(row)])
            assert table.surface.barred_by(row) is None, name
            assert dict(row) == table.surface.row_of(workload), name
            assert workload.run in table.surface.runs

    def test_names_are_unique(self) -> None:
        """No two surfaces have one name, and each has its own rows."""
        names = [table.surface.name for table in tables()]
        assert sorted(set(names)) == sorted(names)
        assert len({table.file for table in tables()}) == len(names)

    def test_every_value_and_rule_has_a_reason(self) -> None:
        """A value that behaves like another is none, and what cannot be is said why."""
        for surface in (table.surface for table in tables()):
            assert all(why for option in surface.options for why in option.values.values()), surface.name
            assert all(len(option.values) > 1 for option in surface.options), surface.name
            assert all(rule.why and len(rule.values) > 1 for rule in surface.rules), surface.name
            known = {option.name: option.values for option in surface.options}
            assert all(
                {*values} <= known[name].keys() for rule in surface.rules for name, values in rule.values.items()
            )

    def test_the_table_counts_what_is_met(self) -> None:
        """Pairs that are possible are in quick, in the rotation, or in none; the others are excluded."""
        _, *told = lines(plan())
        assert [*found()] == [line.split()[0] for line in told]
        for line in told:
            _, _, possible, quick, rotation, by_none, _, kind = line.split()
            assert int(possible) == int(quick) + int(rotation) + int(by_none)
            assert kind in ("pairs", "triples")

    def test_a_surface_is_described(self) -> None:
        """With each value and rule; one that there is not is told."""
        text = "\n".join(described("exchange"))
        assert "Qwen3-Next: more than the 8 lanes" in text
        assert "layout single with asynchrony poisoned" in text
        with pytest.raises(LookupError, match="no surface 'nothing'; known: exchange"):
            list(described("nothing"))


class TestPossible:
    def test_what_one_rule_bars_is_not_possible(self) -> None:
        """Of 12 pairs of three options one is barred."""
        assert 12 == len(toy().possible())
        barred = Rule({"a": ("yes",), "b": ("yes",)}, "")
        assert 11 == len(toy(barred).possible())

    def test_what_rules_bar_together_is_not_possible_either(self) -> None:
        """With a either value of c is barred by b: no row is left with that pair."""
        rules = [Rule({"a": ("yes",), "b": ("yes",), "c": (value,)}, "") for value in ("no", "yes")]
        assert frozenset({("a", "yes"), ("b", "yes")}) not in toy(*rules).possible()
        assert 11 == len(toy(*rules).possible())


class TestReached:
    def test_every_case_of_a_layout_beside_is_run(self) -> None:
        """A chapter that names a layout with few workloads runs there what it draws: some profile reaches each."""
        unreached = []
        for profile in ("quick", "full"):
            run = scripts.beside(profile)
            for chapter in scripts.chapters():
                for layout in {*chapter.quick} & run.keys():
                    drawn = {workload.name for workload in chapter.draw("alltoall", layout, "quick")}
                    unreached += [f"{name} on {layout.name} in {profile}" for name in sorted(drawn - {*run[layout]})]
        assert [] == unreached

    def test_pairs_run_on_known_layouts(self) -> None:
        """Each row is of a layout of the quick profile, so that the rotation of both profiles has it."""
        known = {layout.name for layout in (*quick_layouts(), *beside("quick"))}
        assert {layout_of(row) for table in tables() for row in table.rows.values()} <= known
        assert {*quick_layouts(), *beside("quick")} <= {*full_layouts(), *beside("full")}
