"""EXCH: exchanges that deliver rows into a receive buffer of fixed size."""

from __future__ import annotations

from moe_conformance.chapters.capacity.judge.receive_budget import judge_budget, judge_fixed_size
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_gradients,
    judge_own_dweights,
    judge_own_dx,
    judge_own_outputs,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload


def has_budget(workload: Workload) -> bool:
    """Whether the receive buffer has a stated size."""
    return workload.config.receive_buffer.factor is not None


class TestBudget:
    @requirement("EXCH-22", run=ExchangeStep(), when=has_budget)
    def test_a_fixed_buffer_changes_nothing(self, reading: Reading, tally: Tally) -> None:
        """The receive buffer keeps its size; deliveries, outputs and gradients are those of a buffer of exact size."""
        judge_deliveries(reading, tally)
        judge_rows(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)
        judge_fixed_size(reading, tally)  # last: where there is none to see, all else is judged

    @requirement("EXCH-22", run=ExpertsStep(), when=has_budget)
    def test_a_fixed_buffer_changes_nothing_for_experts(self, reading: Reading, tally: Tally) -> None:
        """With the backend's experts too; rows of no token change no gradient of a parameter."""
        judge_own_outputs(reading, tally)
        judge_own_dx(reading, tally)
        judge_own_dweights(reading, tally)
        judge_expert_gradients(reading, tally)

    @requirement("EXCH-25", run=ExchangeStep(), when=has_budget)
    def test_a_budget_holds_the_load_that_it_states(self, reading: Reading, tally: Tally) -> None:
        """The receive buffer holds the stated multiple of the balanced load; no row of such a load is dropped."""
        judge_deliveries(reading, tally)
        judge_budget(reading, tally)
