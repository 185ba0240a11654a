"""OVLP: asynchronous collectives, in runs in which every read and write of their data is watched."""

from __future__ import annotations

from moe_conformance.judging.observed.ledgers import judge_hazards
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep
from moe_conformance.workloads.records.workload import Workload


def watched(workload: Workload) -> bool:
    """Whether reads and writes of data in flight are recorded."""
    return workload.asynchrony == "watched"


class TestExchange:
    @requirement("OVLP-01", run=ExchangeStep(), when=watched)
    def test_nothing_is_touched_before_it_was_waited_for(self, outcome: Outcome, tally: Tally) -> None:
        """The data that a collective delivers is neither read nor written between its call and its wait."""
        judge_hazards(outcome, tally, "output touched", "output written")

    @requirement("OVLP-02", run=ExchangeStep(), when=watched)
    def test_what_is_sent_stays_as_it_was(self, outcome: Outcome, tally: Tally) -> None:
        """The data that a collective sends is not changed between its call and its wait."""
        judge_hazards(outcome, tally, "sent data changed")

    @requirement("OVLP-03", run=ExchangeStep(), when=watched)
    def test_every_collective_is_waited_for(self, outcome: Outcome, tally: Tally) -> None:
        """No handle of an asynchronous collective is left without a wait at the end of the step."""
        judge_hazards(outcome, tally, "never waited")


class TestOwnExpertsAndFinish:
    @requirement("OVLP-01", run=ExpertsStep(), when=watched)
    def test_own_experts_touch_nothing_early(self, outcome: Outcome, tally: Tally) -> None:
        """Nor by the backend's own experts, or while their gradients are finished."""
        judge_hazards(outcome, tally, "output touched", "output written")

    @requirement("OVLP-02", run=ExpertsStep(), when=watched)
    def test_own_experts_leave_alone_what_is_sent(self, outcome: Outcome, tally: Tally) -> None:
        """Nor by the backend's own experts, or while their gradients are finished."""
        judge_hazards(outcome, tally, "sent data changed")

    @requirement("OVLP-03", run=ExpertsStep(), when=watched)
    def test_own_experts_wait_for_every_collective(self, outcome: Outcome, tally: Tally) -> None:
        """Nor of those that finish the gradients."""
        judge_hazards(outcome, tally, "never waited")


class TestLayers:
    @requirement("OVLP-01", run=LayerStep(), when=watched)
    def test_layers_touch_nothing_early(self, outcome: Outcome, tally: Tally) -> None:
        """Nor by a whole layer whose shared experts run during the exchange."""
        judge_hazards(outcome, tally, "output touched", "output written")

    @requirement("OVLP-02", run=LayerStep(), when=watched)
    def test_layers_leave_alone_what_is_sent(self, outcome: Outcome, tally: Tally) -> None:
        """Nor by a whole layer whose shared experts run during the exchange."""
        judge_hazards(outcome, tally, "sent data changed")

    @requirement("OVLP-03", run=LayerStep(), when=watched)
    def test_layers_wait_for_every_collective(self, outcome: Outcome, tally: Tally) -> None:
        """Nor of those that run during the shared experts."""
        judge_hazards(outcome, tally, "never waited")
