"""Meters with a part of what a meter may have: the rest is not offered, and none of it is a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_conformance.chapters.overload.judge import around
from moe_conformance.chapters.overload.judge.reports import AVERAGE, judge_names, judge_uneven, judge_values
from moe_conformance.chapters.overload.workloads.conditions import scripts
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.verdict import NotOffered, Tally
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One pool of ranks."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


@pytest.fixture(scope="module")
def without_factors(engine: Engine) -> Outcome:
    """What native's meter reports of recomputed forwards, without the factors."""
    workload = next(each for each in scripts("alltoall", Layout(1), "quick") if each.name == "load-recomputed-alike")
    outcome = moe_step(engine, "native", workload)
    (rank,) = outcome.ranks
    answers = tuple(
        replace(each, values={**each.values, "values": None}) if "values" in each.values else each
        for each in rank.answers
    )
    return replace(outcome, ranks=(replace(rank, answers=answers),))


class TestWithoutFactors:
    def test_factors_are_not_offered(self, without_factors: Outcome) -> None:
        """Neither are their names, the end of their reports, and what these cost."""
        costs = (around.judge_constant_collectives, around.judge_few_collectives)
        for judge in (lambda *given: judge_values(*given, AVERAGE), judge_names, judge_uneven, *costs):
            with pytest.raises(NotOffered, match="this meter has no overload factors"):
                judge(without_factors, Tally())

    def test_counter_and_trace_are_judged(self, without_factors: Outcome) -> None:
        """They stand beside the factors."""
        tally = Tally()
        around.judge_counters(without_factors, tally)
        around.judge_trace(without_factors, tally)
        assert not tally.vacuous
