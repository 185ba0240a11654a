"""EXCH: dispatch, the rows that experts receive, and combine, with the suite's probe as the expert."""

from __future__ import annotations

from moe_conformance.chapters.exchange.judge import judge_every_bit_of_rows
from moe_conformance.judging.observed.aliasing import judge_kept_outputs, judge_state
from moe_conformance.judging.observed.completion import judge_finished
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.identity_experts import (
    judge_answered_outputs,
    judge_identity_inputs,
    judge_identity_outputs,
)
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.shared.exchange.weights import judge_weights
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.features import (
    has_empty_slots,
    has_filled_memory,
    outputs_meet_others,
    several_in_flight,
    without_gradients,
)
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload


def several_ranks(workload: Workload) -> bool:
    """Whether there is another rank."""
    return workload.layout.world > 1


class TestDispatch:
    @requirement("EXCH-01", run=ExchangeStep())
    def test_every_pair_reaches_its_expert_once(self, reading: Reading, tally: Tally) -> None:
        """Every routed pair is delivered exactly once to each rank that holds its expert, and nothing else is."""
        judge_deliveries(reading, tally)

    @requirement("EXCH-02", run=ExchangeStep())
    def test_rows_arrive_unchanged(self, reading: Reading, tally: Tally) -> None:
        """Every row that an expert receives is the hidden state of one token."""
        judge_rows(reading, tally)

    @requirement("EXCH-02", run=ExchangeStep(answered="identity of parts"))
    def test_rows_arrive_with_every_bit(self, reading: Reading, tally: Tally) -> None:
        """Hidden states that use every bit of their dtype are delivered unrounded."""
        judge_every_bit_of_rows(reading, tally)

    @requirement("EXCH-03", run=ExchangeStep())
    def test_weights_stay_with_their_rows(self, reading: Reading, tally: Tally) -> None:
        """A weight that is sent with a row is that of the row's own token and slot."""
        judge_weights(reading, tally)

    @requirement("EXCH-04", run=ExchangeStep())
    def test_claimed_counts_are_true(self, reading: Reading, tally: Tally) -> None:
        """The reported tokens per expert are the rows that are delivered."""
        judge_counts(reading, tally)

    @requirement("EXCH-04", run=ExchangeStep(option="capacity padding"))
    def test_claimed_counts_of_padded_experts_are_true(self, reading: Reading, tally: Tally) -> None:
        """Where experts are padded to capacity, the reported tokens per expert are the rows that are delivered."""
        judge_counts(reading, tally)

    @requirement("EXCH-04", run=ExchangeStep(option="packing"))
    def test_claimed_counts_of_packed_sequences_are_true(self, reading: Reading, tally: Tally) -> None:
        """The reported tokens per expert are the rows of packed sequences that are delivered, and of no gap."""
        judge_counts(reading, tally)


class TestCollectives:
    @requirement("EXCH-12", run=ExchangeStep(), when=several_ranks)
    def test_ranks_agree_on_their_collectives(self, outcome: Outcome, tally: Tally) -> None:
        """The ranks of a group make the same calls in the same order, and send what the others expect."""
        judge_agreement(outcome, tally)


class TestCombine:
    @requirement("EXCH-05", run=ExchangeStep())
    def test_tokens_get_the_weighted_sum_of_their_experts(self, reading: Reading, tally: Tally) -> None:
        """The output of a token is the sum of its own experts' outputs, each times its own weight."""
        judge_outputs(reading, tally)

    @requirement("EXCH-05", run=ExchangeStep(answered="identity of parts"))
    def test_answers_and_weights_arrive_with_every_bit(self, reading: Reading, tally: Tally) -> None:
        """Expert outputs and weights that use every bit of their dtype are combined unrounded."""
        judge_answered_outputs(reading, tally)

    @requirement("EXCH-05", run=ExchangeStep(answered="identity"))
    def test_answers_may_lie_where_rows_were_handed_over(self, reading: Reading, tally: Tally) -> None:
        """The output is the weighted sum also where the experts return the tensor that they received."""
        judge_identity_outputs(reading, tally)

    @requirement("EXCH-08", run=ExchangeStep(answered="identity"))
    def test_inputs_are_left_alone_where_rows_come_back(self, reading: Reading, tally: Tally) -> None:
        """Inputs hold the same bytes after experts returned the tensor that they received."""
        judge_identity_inputs(reading, tally)

    @requirement("EXCH-06", run=ExchangeStep(), when=has_empty_slots)
    def test_empty_slots_add_nothing(self, reading: Reading, tally: Tally) -> None:
        """An empty slot adds nothing to its token, receives no gradient and gives none."""
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("EXCH-07", run=ExchangeStep())
    def test_output_has_the_form_of_the_input(self, reading: Reading, tally: Tally) -> None:
        """The output has the input's shape and dtype and is finite."""
        judge_form(reading, tally)


class TestBehaviour:
    @requirement("EXCH-08", run=ExchangeStep())
    def test_inputs_are_left_alone(self, reading: Reading, tally: Tally) -> None:
        """Tokens, ids, weights and upstream gradients hold the same bytes after the step."""
        judge_inputs(reading, tally)

    @requirement("EXCH-09", run=ExchangeStep())
    def test_every_rank_finishes(self, reading: Reading, tally: Tally) -> None:
        """Every rank finishes forward and backward, whatever its load."""
        judge_finished(reading, tally)

    @requirement("EXCH-10", run=ExchangeStep(), when=several_in_flight)
    def test_microbatches_in_flight_are_kept_apart(self, reading: Reading, tally: Tally) -> None:
        """Microbatches that overlap in time have the deliveries, outputs and gradients of separate ones."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("EXCH-32", run=ExchangeStep(), when=outputs_meet_others)
    def test_outputs_outlive_other_microbatches(self, reading: Reading, tally: Tally) -> None:
        """An output and the delivered rows hold their bytes until their own backward has ended."""
        judge_kept_outputs(reading, tally)

    @requirement("EXCH-32", run=ExchangeStep(option="capacity padding"), when=outputs_meet_others)
    def test_outputs_of_filled_experts_outlive_others(self, reading: Reading, tally: Tally) -> None:
        """Nor is an output overwritten with capacity.padded."""
        judge_kept_outputs(reading, tally)

    @requirement("EXCH-32", run=ExchangeStep(answered="identity"), when=outputs_meet_others)
    def test_outputs_of_the_same_tensor_outlive_others(self, reading: Reading, tally: Tally) -> None:
        """Nor where experts return the tensor that they received."""
        judge_kept_outputs(reading, tally)

    @requirement("EXCH-32", run=ExchangeStep(option="packing"), when=outputs_meet_others)
    def test_outputs_of_packed_sequences_outlive_others(self, reading: Reading, tally: Tally) -> None:
        """Nor in an exchange for packed sequences."""
        judge_kept_outputs(reading, tally)

    @requirement("EXCH-32", run=ExchangeStep(tokens="duplicated"), when=outputs_meet_others)
    def test_outputs_of_copies_outlive_others(self, reading: Reading, tally: Tally) -> None:
        """Nor where all tp ranks hold the same tokens."""
        judge_kept_outputs(reading, tally)

    @requirement("EXCH-38", run=ExchangeStep(), when=without_gradients)
    def test_inference_delivers_and_answers_alike(self, reading: Reading, tally: Tally) -> None:
        """Forwards without gradients deliver the same pairs and give the same outputs, also between others."""
        judge_deliveries(reading, tally)
        judge_rows(reading, tally)
        judge_outputs(reading, tally)

    @requirement("EXCH-38", run=ExchangeStep(answered="identity of parts"), when=without_gradients)
    def test_inference_keeps_every_bit(self, reading: Reading, tally: Tally) -> None:
        """Forwards without gradients round neither rows nor outputs."""
        judge_every_bit_of_rows(reading, tally)
        judge_answered_outputs(reading, tally)

    @requirement("EXCH-39", run=ExchangeStep(), when=has_filled_memory)
    def test_uninitialised_memory_reaches_nothing(self, reading: Reading, tally: Tally) -> None:
        """Deliveries, outputs and gradients are right where uninitialised memory is full of NaN."""
        judge_deliveries(reading, tally)
        judge_rows(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("EXCH-11", run=ExchangeStep())
    def test_global_state_is_left_alone(self, reading: Reading, tally: Tally) -> None:
        """Random generators, default dtype, grad mode, deterministic flags and threads are as before the step."""
        judge_state(reading, tally)
