"""OVLP: asynchronous collectives, whose data is watched, and steps and exchanges that overlap with computation."""

from __future__ import annotations

from moe_conformance.chapters.overlap.judge.overlap_evidence import judge_calls, judge_order, judge_overlapping
from moe_conformance.chapters.overlap.judge.overlapped import judge_step_gradients, judge_step_tokens
from moe_conformance.chapters.overlap.workloads import OverlapStep
from moe_conformance.judging.observed.ledgers import judge_hazards
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_rows_gradients
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.features import exchanges
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


def defers(workload: Workload) -> bool:
    """Whether weight gradients are deferred."""
    return workload.config.overlap.deferred_weights


def defers_several(workload: Workload) -> bool:
    """Whether weight gradients of several microbatches are deferred."""
    return defers(workload) and len(workload.batches) > 1


def defers_and_reduces(workload: Workload) -> bool:
    """Whether weight gradients are deferred, and expert gradients reduced over replicas."""
    return defers(workload) and workload.layout.edp > 1


def is_delayed(workload: Workload) -> bool:
    """Whether what ranks compute and receive comes late."""
    return bool(workload.twist.late) or workload.asynchrony == "poisoned"


def overlaps_microbatches(workload: Workload) -> bool:
    """Whether there are exchanges, and several microbatches to overlap them with."""
    return exchanges(workload.layout) and len(workload.batches) > 1


def calls_once(workload: Workload) -> bool:
    """Whether there are exchanges, and no forward runs again."""
    return exchanges(workload.layout) and not workload.config.overlap.recompute_experts


def has_further_options(workload: Workload) -> bool:
    """Whether something is asked for beside overlap and shared experts."""
    config = workload.config
    plain = {"overlap.layers": config.overlap.layers, "shared.ffn": config.shared.ffn, "variant": config.variant}
    sizes = {name: getattr(config, name) for name in ("experts", "hidden", "ffn")}
    return config != type(config)().changed({**plain, **sizes})


class TestSteps:
    @requirement("OVLP-04", run=OverlapStep())
    def test_tokens_are_those_of_the_sequential_step(self, reading: Reading, tally: Tally) -> None:
        """Outputs and input gradients have the same bits, whatever ran beside a microbatch."""
        judge_step_tokens(reading, tally)

    @requirement("OVLP-05", run=OverlapStep())
    def test_gradients_are_those_of_the_sequential_step(self, reading: Reading, tally: Tally) -> None:
        """Parameters end with the gradients of the sequential step, after these are finished."""
        judge_step_gradients(reading, tally, "first", finished=True)

    @requirement("OVLP-11", run=OverlapStep(), when=is_delayed)
    def test_durations_change_nothing(self, reading: Reading, tally: Tally) -> None:
        """Operators and collectives that take longer, on some ranks or on all, change no bit."""
        judge_step_tokens(reading, tally)
        judge_step_gradients(reading, tally, "first", finished=False)

    @requirement("OVLP-12", run=OverlapStep(), when=overlaps_microbatches)
    def test_exchanges_are_in_flight_during_other_work(self, reading: Reading, tally: Tally) -> None:
        """Products of matrices run while exchanges are in flight: no error is no proof of overlap."""
        judge_overlapping(reading, tally)

    @requirement("OVLP-14", run=OverlapStep(), when=calls_once)
    def test_calls_are_those_of_the_sequential_step(self, reading: Reading, tally: Tally) -> None:
        """A rank makes the same collective calls, in any order that the ranks of a group agree on."""
        judge_calls(reading, tally)

    @requirement("OVLP-15", run=OverlapStep(), when=has_further_options)
    def test_other_options_change_nothing(self, reading: Reading, tally: Tally) -> None:
        """With each option added to overlap, results are those of the sequential step with that option."""
        judge_step_tokens(reading, tally)
        judge_step_gradients(reading, tally, "first", finished=True)


class TestDeferredWeights:
    @requirement("OVLP-06", run=OverlapStep(), when=defers)
    def test_deferred_gradients_are_those_computed_at_once(self, reading: Reading, tally: Tally) -> None:
        """Every parameter has the gradient that it gets when nothing is deferred."""
        judge_step_gradients(reading, tally, "first", finished=False)

    @requirement("OVLP-07", run=OverlapStep(), when=defers_several)
    def test_each_is_computed_once(self, reading: Reading, tally: Tally) -> None:
        """None is left out, repeated, made of another microbatch, or left for the next step."""
        judge_step_gradients(reading, tally, "first", finished=False)
        judge_step_gradients(reading, tally, "second", finished=False)

    @requirement("OVLP-08", run=OverlapStep(), when=defers_several)
    def test_they_are_added_to_what_is_there(self, reading: Reading, tally: Tally) -> None:
        """Behind a microbatch that has left gradients, the sum over all of them is found."""
        judge_step_gradients(reading, tally, "second", finished=False)

    @requirement("OVLP-09", run=OverlapStep(), when=defers_and_reduces)
    def test_reductions_follow_them(self, reading: Reading, tally: Tally) -> None:
        """Sums over replicas hold the deferred part of every gradient."""
        judge_step_gradients(reading, tally, "first", finished=True)
        judge_step_gradients(reading, tally, "second", finished=True)

    @requirement("OVLP-10", run=OverlapStep(), when=defers_several)
    def test_down_comes_before_gate_and_up(self, reading: Reading, tally: Tally) -> None:
        """Weight gradients of a layer are computed in the order in which the backward reached them."""
        judge_order(reading, tally)


class TestStepHazards:
    @requirement("OVLP-01", run=OverlapStep(), when=watched)
    def test_steps_touch_nothing_early(self, outcome: Outcome, tally: Tally) -> None:
        """Nor by a step that computes something else meanwhile."""
        judge_hazards(outcome, tally, "output touched", "output written")

    @requirement("OVLP-02", run=OverlapStep(), when=watched)
    def test_steps_leave_alone_what_is_sent(self, outcome: Outcome, tally: Tally) -> None:
        """Nor by a step that computes something else meanwhile."""
        judge_hazards(outcome, tally, "sent data changed")

    @requirement("OVLP-03", run=OverlapStep(), when=watched)
    def test_steps_wait_for_every_collective(self, outcome: Outcome, tally: Tally) -> None:
        """Nor of those that a step left in flight for another microbatch."""
        judge_hazards(outcome, tally, "never waited")


class TestChunks:
    @requirement("OVLP-13", run=ExchangeStep(option="chunks"))
    def test_chunks_give_the_result_of_one_piece(self, reading: Reading, tally: Tally) -> None:
        """Deliveries, outputs and gradients do not depend on the number of chunks."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_rows_gradients(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)
