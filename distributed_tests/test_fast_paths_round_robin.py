"""FAST: exchanges of a round robin, which may be computed without routing."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.judge.round_robin import judge_start
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_rows_gradients
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


class TestRoundRobin:
    @requirement("FAST-14", run=ExchangeStep(option="round robin"))
    def test_results_are_those_of_the_ids(self, reading: Reading, tally: Tally) -> None:
        """Deliveries, outputs and gradients are those of the ids, whether every token goes to one rank or not."""
        judge_start(reading)
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_rows_gradients(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)
