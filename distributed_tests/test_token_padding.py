"""PACK: token counts that differ from rank to rank, padded to one and unpadded."""

from __future__ import annotations

from moe_conformance.chapters.token_padding.judge import (
    judge_added_rows,
    judge_alignment,
    judge_broken_bound,
    judge_dispatched_rows,
    judge_group_of_maximum,
    judge_no_maximum,
    judge_padded_counts,
    judge_stated_padding,
)
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import RESULTS, judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_outputs
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_dweights,
    judge_expert_dx,
    judge_expert_gradients,
    judge_expert_outputs,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import exchanges, features
from moe_conformance.workloads.records.runs import ON_EXCHANGE, ExchangeStep, ExpertsStep, Script
from moe_conformance.workloads.records.workload import Workload


def padded(workload: Workload) -> bool:
    """Whether token counts are padded to a common size."""
    return workload.config.padding.tokens != "no"


def padded_to_largest(workload: Workload) -> bool:
    """Whether that size is the largest count of the group."""
    return workload.config.padding.tokens == "group_max"


def bounded(workload: Workload) -> bool:
    """Whether that size is a configured bound."""
    return workload.config.padding.tokens == "bound"


def padded_in_turn(workload: Workload) -> bool:
    """Whether several microbatches are padded, each to its own size."""
    return padded(workload) and len(workload.batches) > 1


def unpadded(workload: Workload) -> bool:
    """Whether token counts are not padded, in a plain step."""
    return not padded(workload) and exchanges(workload.layout) and workload.schedule == "F0 B0"


def plain(workload: Workload) -> bool:
    """Whether token counts are not padded, on one rank or many, in a plain step."""
    return not padded(workload) and workload.schedule == "F0 B0"


def uneven(workload: Workload) -> bool:
    """Whether ranks that exchange tokens have more or fewer of them, and nothing is padded."""
    return not padded(workload) and exchanges(workload.layout) and bool(features(workload, "")["uneven_tokens"])


class TestCount:
    test_ranks_pad_to_the_largest_count = Row(
        "PACK-01", Script("token_padding"), judge_padded_counts, when=padded_to_largest
    )
    """Every rank pads to the largest token count of its exchange group, rounded up."""

    test_ranks_pad_to_the_bound = Row("PACK-11", Script("token_padding"), judge_padded_counts, when=bounded)
    """Every rank pads to the bound, rounded up."""

    test_there_is_one_alignment = Row("PACK-02", Script("token_padding"), judge_alignment)
    """The stated alignment is the configured one, and every padded count is a multiple of it."""

    test_the_exchange_group_is_asked = Row(
        "PACK-01",
        ExchangeStep(),
        (judge_dispatched_rows, judge_group_of_maximum),
        when=lambda workload: padded_to_largest(workload) and exchanges(workload.layout),
    )
    """The exchange group all-reduces (MAX) the token count, with no other rank, and dispatches that many tokens."""

    test_a_broken_bound_is_refused_by_all = Row("PACK-12", ON_EXCHANGE, judge_broken_bound, when=bounded)
    """Where a rank has more tokens than padding.bound, all ranks of its group raise, and none waits for another."""


class TestExchange:
    test_added_rows_route_nowhere = Row(
        "PACK-03", ExchangeStep(), (judge_deliveries, judge_rows, judge_added_rows, judge_counts), when=padded
    )
    """Deliveries and counts are those of the real tokens."""

    test_rows_that_nobody_asked_for_route_nowhere = Row("PACK-03", ExchangeStep(), judge_added_rows, when=plain)
    """Without padding too, no expert receives rows of zeros but the claimed padding of its own rows."""

    test_output_is_cut_back_to_the_own_tokens = Row("PACK-04", ExchangeStep(), (judge_form, judge_outputs), when=padded)
    """Every rank has the outputs of its own tokens, in their places and in the shape of the input."""

    test_gradients_are_those_without_padding = Row("PACK-05", ExchangeStep(), (judge_dx, judge_dweights), when=padded)
    """Tokens and weights have the gradients that they have unpadded."""

    test_nothing_depends_on_the_alignment = Row(
        "PACK-02", ExchangeStep(), (judge_stated_padding, *RESULTS), when=padded
    )
    """With any alignment, outputs and gradients equal the oracle's bit for bit; the exchange states it."""

    test_counts_belong_to_their_microbatch = Row(
        "PACK-06", ExchangeStep(), (judge_deliveries, judge_form, *RESULTS), when=padded_in_turn
    )
    """Microbatches of different sizes, in flight together or one by one, are padded and unpadded separately."""

    test_a_bound_needs_no_question = Row(
        "PACK-11", ExchangeStep(), (judge_no_maximum, judge_dispatched_rows, *RESULTS), when=bounded
    )
    """With padding.bound no collective of token counts is called, and outputs and gradients are the same."""

    test_switched_off_it_does_nothing = Row(
        "PACK-13", ExchangeStep(), (judge_no_maximum, judge_dispatched_rows, *RESULTS), when=unpadded
    )
    """Without padding no such collective is called, and outputs and gradients equal the oracle's bit for bit."""

    test_uneven_counts_are_not_taken_for_equal = Row("PACK-14", ExchangeStep(), (judge_form, *RESULTS), when=uneven)
    """Ranks with different numbers of tokens, some with none, have outputs and gradients of their own tokens."""

    test_packed_counts_are_not_taken_for_equal = Row("PACK-14", ExchangeStep(option="packing"), (judge_form, *RESULTS))
    """With packed sequences, ranks of any T have the outputs and gradients of their own tokens."""


class TestOwnExperts:
    test_output_is_cut_back_to_the_own_tokens = Row(
        "PACK-04", ExpertsStep(), (judge_form, judge_expert_outputs), when=padded
    )
    """With the backend's experts too, every rank has the outputs of its own tokens."""

    test_gradients_are_those_without_padding = Row(
        "PACK-05", ExpertsStep(), (judge_expert_dx, judge_expert_dweights, judge_expert_gradients), when=padded
    )
    """Tokens, weights and experts have the gradients that they have unpadded."""
