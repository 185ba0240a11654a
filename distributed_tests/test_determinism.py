"""DET: repeated runs give the same bits, whatever ran before, whichever rank is late and whatever the random state."""

from __future__ import annotations

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.chapters.determinism.judge import judge_settings
from moe_conformance.chapters.determinism.workloads import with_deterministic
from moe_conformance.judging.shared.equivalence.routes import judge_repeated_routes
from moe_conformance.judging.shared.equivalence.runs import (
    RunTwins,
    judge_alike,
    judge_recomputed_steps,
    judge_repeated,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import likened, likened_once, likened_sums
from moe_conformance.workloads.records.runs import ExpertsStep, LayerStep, RouterStep
from moe_conformance.workloads.records.workload import Workload


def likened_on_ranks(workload: Workload) -> bool:
    """Select runs that others are compared with and in which one rank can be late for another."""
    return likened_once(workload) and workload.layout.world > 1


class TestRepetition:
    test_fresh_processes_give_the_same_bits = Row(
        "DET-01", ExpertsStep(), judge_repeated, when=likened_once, twins=with_deterministic(determinism.again)
    )
    """The same inputs and parameters give the same bits in other processes, with deterministic algorithms."""

    test_fresh_processes_route_alike = Row(
        "DET-01", RouterStep(), judge_repeated_routes, when=likened, twins=with_deterministic(determinism.again)
    )
    """The same tokens have the same experts and the same weights, to the bit, in other processes."""

    test_fresh_processes_force_alike = Row(
        "DET-01", RouterStep(forced="draws"), judge_repeated_routes, twins=determinism.afresh
    )
    """Forced routes follow their seed: they are the same in new processes."""

    test_a_second_step_gives_the_same_bits = Row(
        "DET-05", ExpertsStep(), judge_alike, when=likened_once, twins=determinism.twice
    )
    """A step taken twice, gradients cleared in between, gives the same outputs and gradients twice."""


class TestRecomputation:
    test_recomputation_gives_the_same_bits = Row(
        "DET-04", ExpertsStep(), judge_recomputed_steps, when=likened_once, twins=determinism.recomputed
    )
    """A step whose forward runs again in the backward gives the outputs and gradients of one without."""

    test_layers_recomputed_give_the_same_bits = Row(
        "DET-04", LayerStep(), judge_alike, when=likened_sums, twins=determinism.recomputed_layers
    )
    """A step of whole layers that run again in the backward gives the outputs and gradients of one without."""


class TestSurroundings:
    @requirement("DET-07", run=ExpertsStep(), when=likened_once)
    def test_the_settings_of_the_process_are_left_alone(self, outcome: Outcome, twins: RunTwins, tally: Tally) -> None:
        """Importing a backend, building with it, being refused by it and closing it leave all settings as they were."""
        judge_settings(twins(determinism.lifetime(outcome.workload)), tally)

    test_random_generators_do_not_matter = Row(
        "DET-02", ExpertsStep(), judge_alike, when=likened_once, twins=determinism.seeded
    )
    """A step that draws no random numbers gives the same bits from any state of the random generators."""

    test_late_ranks_do_not_matter = Row(
        "DET-06", ExpertsStep(), judge_repeated, when=likened_on_ranks, twins=with_deterministic(determinism.delayed)
    )
    """Whichever rank is late, all ranks have the same bits, with deterministic algorithms."""
