"""EXCH: dispatch, the rows that experts receive, and combine, with the suite's probe as the expert."""

from __future__ import annotations

from moe_conformance.chapters.exchange.judge.every_bit import judge_every_bit_of_rows
from moe_conformance.chapters.exchange.judge.rounded_sums import judge_rounded_sums
from moe_conformance.judging.observed.aliasing import judge_finished, judge_kept_outputs, judge_state
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import RESULTS, judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.identity_experts import (
    judge_answered_outputs,
    judge_identity_inputs,
    judge_identity_outputs,
)
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.shared.exchange.weights import judge_weights
from moe_conformance.spec.row import Row
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
    test_every_pair_reaches_its_expert_once = Row("EXCH-01", ExchangeStep(), judge_deliveries)
    """Every routed pair is delivered exactly once to each rank that holds its expert, and nothing else is."""

    test_rows_arrive_unchanged = Row("EXCH-02", ExchangeStep(), judge_rows)
    """Every row that an expert receives is the hidden state of one token."""

    test_rows_arrive_with_every_bit = Row(
        "EXCH-02", ExchangeStep(answered="identity of parts"), judge_every_bit_of_rows
    )
    """Hidden states that use every bit of their dtype are delivered unrounded."""

    test_weights_stay_with_their_rows = Row("EXCH-03", ExchangeStep(), judge_weights)
    """A weight that is sent with a row is that of the row's own token and slot."""

    test_claimed_counts_are_true = Row("EXCH-04", ExchangeStep(), judge_counts)
    """The reported tokens per expert are the rows that are delivered."""

    test_claimed_counts_of_padded_experts_are_true = Row(
        "EXCH-04", ExchangeStep(option="capacity padding"), judge_counts
    )
    """Where experts are padded to capacity, the reported tokens per expert are the rows that are delivered."""

    test_claimed_counts_of_packed_sequences_are_true = Row("EXCH-04", ExchangeStep(option="packing"), judge_counts)
    """The reported tokens per expert are the rows of packed sequences that are delivered, and of no gap."""


class TestCollectives:
    test_ranks_agree_on_their_collectives = Row("EXCH-12", ExchangeStep(), judge_agreement, when=several_ranks)
    """The ranks of a group make the same calls in the same order, and send what the others expect."""


class TestCombine:
    test_tokens_get_the_weighted_sum_of_their_experts = Row("EXCH-05", ExchangeStep(), judge_outputs)
    """The output of a token is the sum of its own experts' outputs, each times its own weight."""

    test_answers_and_weights_arrive_with_every_bit = Row(
        "EXCH-05", ExchangeStep(answered="identity of parts"), judge_answered_outputs
    )
    """Expert outputs and weights that use every bit of their dtype are combined unrounded."""

    test_sums_are_rounded_as_claimed = Row(
        "EXCH-05", ExchangeStep(answered="identity of parts", option="rounding"), judge_rounded_sums
    )
    """Where rows have fewer bits than weights, only what the backend claims is rounded before the output."""

    test_answers_may_lie_where_rows_were_handed_over = Row(
        "EXCH-05", ExchangeStep(answered="identity"), judge_identity_outputs
    )
    """The output is the weighted sum also where the experts return the tensor that they received."""

    test_inputs_are_left_alone_where_rows_come_back = Row(
        "EXCH-08", ExchangeStep(answered="identity"), judge_identity_inputs
    )
    """Inputs hold the same bytes after experts returned the tensor that they received."""

    test_empty_slots_add_nothing = Row("EXCH-06", ExchangeStep(), RESULTS, when=has_empty_slots)
    """An empty slot adds nothing to its token, receives no gradient and gives none."""

    test_output_has_the_form_of_the_input = Row("EXCH-07", ExchangeStep(), judge_form)
    """The output has the input's shape and dtype and is finite."""


class TestBehaviour:
    test_inputs_are_left_alone = Row("EXCH-08", ExchangeStep(), judge_inputs)
    """Tokens, ids, weights and upstream gradients hold the same bytes after the step."""

    test_every_rank_finishes = Row("EXCH-09", ExchangeStep(), judge_finished)
    """Every rank finishes forward and backward, whatever its load."""

    test_microbatches_in_flight_are_kept_apart = Row(
        "EXCH-10", ExchangeStep(), (judge_deliveries, *RESULTS), when=several_in_flight
    )
    """Microbatches that overlap in time have the deliveries, outputs and gradients of separate ones."""

    test_outputs_outlive_other_microbatches = Row(
        "EXCH-32", ExchangeStep(), judge_kept_outputs, when=outputs_meet_others
    )
    """An output and the delivered rows hold their bytes until their own backward has ended."""

    test_outputs_of_filled_experts_outlive_others = Row(
        "EXCH-32", ExchangeStep(option="capacity padding"), judge_kept_outputs, when=outputs_meet_others
    )
    """Nor is an output overwritten with capacity.padded."""

    test_outputs_of_the_same_tensor_outlive_others = Row(
        "EXCH-32", ExchangeStep(answered="identity"), judge_kept_outputs, when=outputs_meet_others
    )
    """Nor where experts return the tensor that they received."""

    test_outputs_of_packed_sequences_outlive_others = Row(
        "EXCH-32", ExchangeStep(option="packing"), judge_kept_outputs, when=outputs_meet_others
    )
    """Nor in an exchange for packed sequences."""

    test_outputs_of_copies_outlive_others = Row(
        "EXCH-32", ExchangeStep(tokens="duplicated"), judge_kept_outputs, when=outputs_meet_others
    )
    """Nor where all tp ranks hold the same tokens."""

    test_inference_delivers_and_answers_alike = Row(
        "EXCH-38", ExchangeStep(), (judge_deliveries, judge_rows, judge_outputs), when=without_gradients
    )
    """Forwards without gradients deliver the same pairs and give the same outputs, also between others."""

    test_inference_keeps_every_bit = Row(
        "EXCH-38",
        ExchangeStep(answered="identity of parts"),
        (judge_every_bit_of_rows, judge_answered_outputs),
        when=without_gradients,
    )
    """Forwards without gradients round neither rows nor outputs."""

    test_uninitialised_memory_reaches_nothing = Row(
        "EXCH-39", ExchangeStep(), (judge_deliveries, judge_rows, *RESULTS), when=has_filled_memory
    )
    """Deliveries, outputs and gradients are right where uninitialised memory is full of NaN."""

    test_global_state_is_left_alone = Row("EXCH-11", ExchangeStep(), judge_state)
    """Random generators, default dtype, grad mode, deterministic flags and threads are as before the step."""


class TestOneKnob:
    test_outputs_do_not_depend_on_the_knob = Row("EXCH-05", ExchangeStep(option="any"), judge_outputs)
    """Outputs are the weighted sums of the experts, with each option."""

    test_gradients_of_tokens_do_not_depend_on_the_knob = Row("GRAD-02", ExchangeStep(option="any"), judge_dx)
    """The gradient of a token is the sum over its slots, with each option."""

    test_gradients_of_weights_do_not_depend_on_the_knob = Row("GRAD-03", ExchangeStep(option="any"), judge_dweights)
    """The gradient of a weight is that of its own slot, with each option."""
