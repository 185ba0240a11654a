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
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_outputs
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_gradients,
    judge_own_dweights,
    judge_own_dx,
    judge_own_outputs,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
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

    @requirement(
        "PACK-01", run=ExchangeStep(), when=lambda workload: padded_to_largest(workload) and exchanges(workload.layout)
    )
    def test_the_exchange_group_is_asked(self, reading: Reading, tally: Tally) -> None:
        """The exchange group all-reduces (MAX) the token count, with no other rank, and dispatches that many tokens."""
        judge_dispatched_rows(reading, tally)
        judge_group_of_maximum(reading, tally)

    test_a_broken_bound_is_refused_by_all = Row("PACK-12", ON_EXCHANGE, judge_broken_bound, when=bounded)
    """Where a rank has more tokens than padding.bound, all ranks of its group raise, and none waits for another."""


class TestExchange:
    @requirement("PACK-03", run=ExchangeStep(), when=padded)
    def test_added_rows_route_nowhere(self, reading: Reading, tally: Tally) -> None:
        """Deliveries and counts are those of the real tokens."""
        judge_deliveries(reading, tally)
        judge_rows(reading, tally)
        judge_added_rows(reading, tally)
        judge_counts(reading, tally)

    @requirement("PACK-04", run=ExchangeStep(), when=padded)
    def test_output_is_cut_back_to_the_own_tokens(self, reading: Reading, tally: Tally) -> None:
        """Every rank has the outputs of its own tokens, in their places and in the shape of the input."""
        judge_form(reading, tally)
        judge_outputs(reading, tally)

    @requirement("PACK-05", run=ExchangeStep(), when=padded)
    def test_gradients_are_those_without_padding(self, reading: Reading, tally: Tally) -> None:
        """Tokens and weights have the gradients that they have unpadded."""
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-02", run=ExchangeStep(), when=padded)
    def test_nothing_depends_on_the_alignment(self, reading: Reading, tally: Tally) -> None:
        """With any alignment, outputs and gradients equal the oracle's bit for bit; the exchange states it."""
        judge_stated_padding(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-06", run=ExchangeStep(), when=padded_in_turn)
    def test_counts_belong_to_their_microbatch(self, reading: Reading, tally: Tally) -> None:
        """Microbatches of different sizes, in flight together or one by one, are padded and unpadded separately."""
        judge_deliveries(reading, tally)
        judge_form(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-11", run=ExchangeStep(), when=bounded)
    def test_a_bound_needs_no_question(self, reading: Reading, tally: Tally) -> None:
        """With padding.bound no collective of token counts is called, and outputs and gradients are the same."""
        judge_no_maximum(reading, tally)
        judge_dispatched_rows(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-13", run=ExchangeStep(), when=unpadded)
    def test_switched_off_it_does_nothing(self, reading: Reading, tally: Tally) -> None:
        """Without padding no such collective is called, and outputs and gradients equal the oracle's bit for bit."""
        judge_no_maximum(reading, tally)
        judge_dispatched_rows(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-14", run=ExchangeStep(), when=uneven)
    def test_uneven_counts_are_not_taken_for_equal(self, reading: Reading, tally: Tally) -> None:
        """Ranks with different numbers of tokens, some with none, have outputs and gradients of their own tokens."""
        judge_form(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-14", run=ExchangeStep(option="packing"))
    def test_packed_counts_are_not_taken_for_equal(self, reading: Reading, tally: Tally) -> None:
        """With packed sequences, ranks of any T have the outputs and gradients of their own tokens."""
        judge_form(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)


class TestOwnExperts:
    @requirement("PACK-04", run=ExpertsStep(), when=padded)
    def test_output_is_cut_back_to_the_own_tokens(self, reading: Reading, tally: Tally) -> None:
        """With the backend's experts too, every rank has the outputs of its own tokens."""
        judge_form(reading, tally)
        judge_own_outputs(reading, tally)

    @requirement("PACK-05", run=ExpertsStep(), when=padded)
    def test_gradients_are_those_without_padding(self, reading: Reading, tally: Tally) -> None:
        """Tokens, weights and experts have the gradients that they have unpadded."""
        judge_own_dx(reading, tally)
        judge_own_dweights(reading, tally)
        judge_expert_gradients(reading, tally)
