"""Meters with a part of what a meter may have: the rest is not offered, and none of it is a pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_conformance.chapters.overload.judge import around
from moe_conformance.chapters.overload.judge.reports import AVERAGE, judge_names, judge_uneven, judge_values
from moe_conformance.chapters.overload.workloads.conditions import scripts
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.verdict import NotOffered, Tally, WrongCount
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome, RankOutcome


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One pool of ranks."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


def reported(engine: Engine, layout: Layout, ranks_without: set[int]) -> Outcome:
    """Return what native's meter reports of recomputed forwards, without the factors on some ranks."""
    workload = next(each for each in scripts("alltoall", layout, "quick") if each.name == "load-recomputed-alike")
    outcome = moe_step(engine, "native", workload)
    return replace(
        outcome, ranks=tuple(_without(rank) if rank.rank in ranks_without else rank for rank in outcome.ranks)
    )


def _without(rank: RankOutcome) -> RankOutcome:
    answers = tuple(
        replace(each, values={**each.values, "values": None}) if "values" in each.values else each
        for each in rank.answers
    )
    return replace(rank, answers=answers)


@pytest.fixture(scope="module")
def without_factors(engine: Engine) -> Outcome:
    """What a meter without factors reports, on one rank."""
    return reported(engine, Layout(1), {0})


class TestWithoutFactors:
    def test_factors_are_not_offered(self, without_factors: Outcome) -> None:
        """Neither are their names, the end of their reports, and what these cost."""
        costs = (around.judge_constant_collectives, around.judge_few_collectives)
        for judge in (lambda *given: judge_values(*given, AVERAGE), judge_names, judge_uneven, *costs):
            with pytest.raises(NotOffered, match="this meter has no overload factors"):
                judge(without_factors, Tally())

    def test_factors_on_some_ranks_are_no_part_left_out(self, engine: Engine) -> None:
        """A rank whose report lacks what the reports of others have fails, with its number."""
        outcome = reported(engine, Layout(2, ep=2), {1})
        with pytest.raises(WrongCount, match="step 0 on rank 1 has no overload factors, others have"):
            judge_values(outcome, Tally(), AVERAGE)

    def test_counter_and_trace_are_judged(self, without_factors: Outcome) -> None:
        """They stand beside the factors."""
        tally = Tally()
        around.judge_counters(without_factors, tally)
        around.judge_trace(without_factors, tally)
        assert not tally.vacuous


class TestCounterThatGoesOn:
    def test_a_counter_without_a_switch_is_not_compared(self, engine: Engine) -> None:
        """Runs with the meter off, in which the counter goes on, say nothing of what metering changes."""
        workload = next(each for each in scripts("alltoall", Layout(1), "quick") if each.name == "load-switched")
        outcome = moe_step(engine, "native", workload)
        around.judge_same_results(outcome, Tally())
        counted = outcome.ranks[0].answers[1].values["counts_E"]
        answers = tuple(
            replace(each, values={**each.values, "counts_E": counted}) if "counts_E" in each.values else each
            for each in outcome.ranks[0].answers
        )
        with pytest.raises(NotOffered, match="the counter cannot be switched off"):
            around.judge_same_results(replace(outcome, ranks=(replace(outcome.ranks[0], answers=answers),)), Tally())

    def test_a_forward_that_is_counted_again_is_named(self, engine: Engine) -> None:
        """Counts of recomputed forwards in twice are told with their cause."""
        workload = next(w for w in scripts("alltoall", Layout(1), "quick") if w.name == "load-recomputed-alike")
        outcome = moe_step(engine, "native", workload)
        again_E = torch.zeros(8, dtype=torch.int64)
        for entry in workload.calls[0].given[0]["passes"]:
            if entry.recomputed:
                again_E += torch.bincount(entry.ids_TK.flatten(), minlength=8)
        answers = tuple(
            replace(each, values={**each.values, "counts_E": each.values["counts_E"] + again_E})
            if "counts_E" in each.values
            else each
            for each in outcome.ranks[0].answers
        )
        with pytest.raises(WrongCount, match="the forward that recomputation runs again is counted too"):
            around.judge_counters(replace(outcome, ranks=(replace(outcome.ranks[0], answers=answers),)), Tally())
