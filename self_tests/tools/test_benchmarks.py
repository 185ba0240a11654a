"""The benchmark's contenders run all cases, and its judge catches a wrong one in each of them."""

from __future__ import annotations

from operator import attrgetter

import pytest

from benchmarks import cases
from benchmarks.contenders.roster import BLIND, CONTENDERS, CONTINUOUS_1, Contender
from benchmarks.contenders.start import start
from benchmarks.report import summarise
from benchmarks.rounds import Sample, ratios
from benchmarks.timeline import Assignment
from moe_conformance.engine import Engine, Job

# torch's own test classes import a package that torch does not install.
NEEDS = {"continuous": "expecttest", "spawned": "expecttest"}
DISTINCT = [contender for contender in CONTENDERS if contender not in (BLIND, CONTINUOUS_1)]


def split(case: cases.Case) -> list[cases.Outcome]:
    """Returns the oracle's outcome as the ranks would hand it over."""
    whole = cases.oracle(case)
    parts = [getattr(whole, name).chunk(case.world) for name in vars(whole)]
    return [cases.Outcome(*each) for each in zip(*parts, strict=True)]


class TestJudge:
    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("name", ["y_TD", "dx_TD", "dweights_TK", "dup_NDF", "ddown_NFD"])
    def test_one_wrong_element_is_seen(self, world: int, name: str) -> None:
        """The judge accepts the oracle's own outcome and refuses it after a small change of one element."""
        case = cases.make(3, world)
        outcomes = split(case)
        cases.judge(case, outcomes)
        getattr(outcomes[-1], name)[0, 1] += 1e-6
        with pytest.raises(AssertionError, match=f"case 3: {name} is off"):
            cases.judge(case, outcomes)

    def test_cases_are_uneven(self) -> None:
        """Ranks send different numbers of rows to an expert, and every fifth case has an idle expert."""
        for world in (2, 4):
            counts_WE = [ids.flatten().bincount(minlength=cases.E).tolist() for ids in cases.make(4, world).ids_WTK]
            assert len(counts_WE) == len(set(map(tuple, counts_WE)))
            assert all(max(counts) > min(counts) for counts in counts_WE)
            assert 0 == int((cases.make(5, world).ids_WTK == 5).sum())


class TestContenders:
    @pytest.mark.parametrize("contender", DISTINCT, ids=attrgetter("name"))
    def test_each_reports_exactly_the_wrong_case(self, contender: Contender) -> None:
        """All cases before the planted bug pass, and the one with it fails."""
        if contender.name in NEEDS:
            pytest.importorskip(NEEDS[contender.name])
        timing = start(contender, Assignment(world=2, count=2, broken=1, path=""))
        assert {0: True, 1: False} == timing.passed
        assert timing.fixed_s > 0
        assert timing.cases_per_s > 0


class TestLedger:
    def test_a_module_takes_it_away(self) -> None:
        """The same job has entries in its ledger with the engine as it is, and none without the ledger."""
        entries = {}
        for more in ((), ("benchmarks.contenders.without_ledger",)):
            with Engine(preload=("benchmarks.recovery", *more)) as engine:
                result = engine.run(Job("benchmarks.recovery:step", 1, 2, groups={}))
            assert result.ok
            entries[more] = [len(rank.ledger) for rank in result.ranks]
        assert [[5, 5], [0, 0]] == list(entries.values())


class TestFigures:
    def test_ratios_are_taken_within_a_round(self) -> None:
        """A machine that is twice as slow in a round slows both, and leaves the ratio alone."""
        rates = {"bare": (100.0, 50.0), "engine": (90.0, 45.0)}
        samples = [Sample(i, 2, name, 1.0, rate) for name in rates for i, rate in enumerate(rates[name])]
        assert [0.9, 0.9] == ratios(samples, "engine", 2)

    def test_a_summary_tells_median_and_span(self) -> None:
        """Figures keep three digits, or all before the point."""
        assert "0.2 (0.1-7)" == summarise([0.1, 7.0, 0.2]).text()
        assert "1234 (0.0457-20000)" == summarise([0.04567, 1234.4, 20000.0]).text()
