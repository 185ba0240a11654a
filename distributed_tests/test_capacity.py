"""DROP: token drop: how many slots of a rank an expert keeps, which ones, and the effect on outputs and gradients."""

from __future__ import annotations

from moe_conformance.chapters.capacity.judge.budget_overflow_dropped import (
    judge_dropped_rows,
    judge_flags,
    judge_reported,
    judge_room_left,
)
from moe_conformance.chapters.capacity.judge.budget_overflow_refused import judge_after_overflow, judge_overflow
from moe_conformance.chapters.capacity.judge.capacity_padding import (
    judge_dropped_gradients,
    judge_filled,
    judge_lossless_capacity,
    judge_lost_tokens,
    judge_reduced_once,
    judge_worst_case,
)
from moe_conformance.chapters.capacity.judge.token_drops import (
    judge_dropped_in_layer,
    judge_kept_in_layer,
    judge_lost_in_layer,
)
from moe_conformance.chapters.capacity.workloads.budget_overflow import by_factor, drops, refuses, refuses_some
from moe_conformance.chapters.capacity.workloads.routers import fits_all, others_change
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_gradients,
    judge_own_dweights,
    judge_own_dx,
    judge_own_outputs,
)
from moe_conformance.judging.shared.router.capacity import (
    judge_capacity,
    judge_drop_gradients,
    judge_drop_weights,
    judge_filled_load,
    judge_fit,
    judge_lossless,
    judge_minimum,
    judge_own_tokens,
    judge_policy,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.features import has_empty_slots, has_lost_tokens, somebody_gets_all
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep, RouterStep


class TestRoom:
    @requirement("DROP-01", run=RouterStep(capacity=True), when=lambda workload: not workload.config.capacity.minimum)
    def test_the_capacity_is_the_mean_load_times_the_factor(self, reading: Reading, tally: Tally) -> None:
        """For every expert a rank keeps as many slots as the capacity, or all where there are fewer."""
        judge_capacity(reading, tally)

    @requirement("DROP-02", run=RouterStep(capacity=True), when=lambda workload: workload.config.capacity.minimum > 0)
    def test_the_minimum_is_the_least_capacity(self, reading: Reading, tally: Tally) -> None:
        """Where the formula gives less, the configured minimum is the capacity."""
        judge_minimum(reading, tally)

    @requirement("DROP-03", run=RouterStep(capacity=True))
    def test_experts_keep_as_many_as_fit(self, reading: Reading, tally: Tally) -> None:
        """With every drop policy, a slot is dropped only where its expert is at capacity."""
        judge_fit(reading, tally)

    @requirement("DROP-04", run=RouterStep(capacity=True), when=fits_all)
    def test_room_for_all_changes_nothing(self, reading: Reading, tally: Tally) -> None:
        """A capacity of at least the largest load gives the ids and weights of no capacity."""
        judge_lossless(reading, tally)


class TestChoice:
    @requirement(
        "DROP-05",
        run=RouterStep(capacity=True),
        when=lambda workload: workload.config.capacity.drop_policy == "weights",
    )
    def test_the_heaviest_stay(self, reading: Reading, tally: Tally) -> None:
        """With policy "probs", no dropped slot has a larger weight than a kept one of the same expert."""
        judge_policy(reading, tally)

    @requirement(
        "DROP-06",
        run=RouterStep(capacity=True),
        when=lambda workload: workload.config.capacity.drop_policy == "position",
    )
    def test_the_first_stay(self, reading: Reading, tally: Tally) -> None:
        """With policy "position", no dropped slot comes before a kept one of the same expert."""
        judge_policy(reading, tally)

    @requirement("DROP-07", run=RouterStep(capacity=True), when=others_change)
    def test_a_rank_drops_by_its_own_tokens(self, reading: Reading, tally: Tally) -> None:
        """The slots that a rank drops do not depend on the tokens of other ranks."""
        judge_own_tokens(reading, tally)


class TestFilledUp:
    @requirement(
        "DROP-08",
        run=ExchangeStep(option="capacity padding"),
        when=lambda workload: workload.config.capacity.factor is None,
    )
    def test_a_capacity_that_drops_nothing_is_the_largest_load(self, reading: Reading, tally: Tally) -> None:
        """Experts receive the largest load of the group from each rank; the group all-reduces (MAX) it at most once."""
        judge_lossless_capacity(reading, tally)
        judge_reduced_once(reading, tally)

    @requirement("DROP-12", run=ExchangeStep(option="capacity padding"))
    def test_rows_that_fill_up_change_nothing(self, reading: Reading, tally: Tally) -> None:
        """With capacity.padded every expert receives capacity rows; the padding changes no output and no gradient."""
        judge_filled(reading, tally)

    @requirement("DROP-12", run=ExpertsStep(), when=lambda workload: workload.config.capacity.padded)
    def test_experts_do_not_learn_from_rows_that_fill_up(self, reading: Reading, tally: Tally) -> None:
        """With the backend's experts, padding to capacity changes no output and no gradient."""
        for judge in (judge_own_outputs, judge_own_dx, judge_own_dweights, judge_expert_gradients):
            judge(reading, tally)

    @requirement("DROP-12", run=RouterStep(capacity=True), when=lambda workload: workload.config.capacity.padded)
    def test_rows_that_fill_up_are_no_load(self, reading: Reading, tally: Tally) -> None:
        """The load that a router reports counts the selected slots, or the kept ones."""
        judge_filled_load(reading, tally)

    @requirement("DROP-13", run=ExchangeStep(), when=somebody_gets_all)
    def test_the_worst_case_fits(self, reading: Reading, tally: Tally) -> None:
        """A rank whose experts are selected by as many slots of all tokens as possible receives every row."""
        judge_worst_case(reading, tally)


class TestBudget:
    @requirement("DROP-14", run=ExchangeStep(option="receive budget"), when=by_factor)
    def test_nothing_is_lost_without_a_word(self, reading: Reading, tally: Tally) -> None:
        """With receive_buffer.factor, a row that was not delivered was refused or reported as dropped."""
        judge_reported(reading, tally)

    @requirement("DROP-14", run=ExchangeStep(option="receive budget"), when=refuses)
    def test_an_exceeded_budget_is_reported_and_no_other(self, reading: Reading, tally: Tally) -> None:
        """An overflow of the receive buffer is reported if and only if more rows are routed to it than it holds."""
        judge_overflow(reading, tally)

    @requirement("DROP-15", run=ExchangeStep(option="receive budget"), when=refuses_some)
    def test_what_fits_is_exact_after_what_did_not(self, reading: Reading, tally: Tally) -> None:
        """More rows than the receive buffer holds raise on all ranks, and the next microbatch is correct."""
        judge_after_overflow(reading, tally)

    @requirement("DROP-14", run=ExchangeStep(option="receive budget"), when=drops)
    def test_a_full_buffer_is_flagged_and_no_other(self, reading: Reading, tally: Tally) -> None:
        """With receive_buffer.overflow="drop", a rank reports an overflow if and only if rows do not fit."""
        judge_flags(reading, tally)

    @requirement("DROP-15", run=ExchangeStep(option="receive budget"), when=drops)
    def test_dropped_rows_count_nowhere(self, reading: Reading, tally: Tally) -> None:
        """A row over the receive buffer is dropped on all etp ranks, in outputs and gradients; no other row is."""
        judge_dropped_rows(reading, tally)

    @requirement("DROP-16", run=ExchangeStep(option="receive budget"), when=drops)
    def test_a_full_buffer_is_full(self, reading: Reading, tally: Tally) -> None:
        """No row is dropped while the receive buffer has room for it."""
        judge_room_left(reading, tally)


class TestConsequences:
    @requirement("DROP-09", run=RouterStep(capacity=True))
    def test_kept_slots_keep_their_weights(self, reading: Reading, tally: Tally) -> None:
        """The weights of kept slots are those before the drop."""
        judge_drop_weights(reading, tally)

    @requirement("DROP-09", run=LayerStep(drops=True), when=lambda workload: bool(workload.config.capacity.factor))
    def test_kept_slots_add_the_same_in_a_layer(self, reading: Reading, tally: Tally) -> None:
        """In a whole layer the output of a token is the sum of its kept slots, with the weights before the drop."""
        judge_kept_in_layer(reading, tally)

    @requirement("DROP-11", run=RouterStep(capacity=True))
    def test_kept_slots_alone_give_gradients(self, reading: Reading, tally: Tally) -> None:
        """A dropped slot gives its token and the router no gradient except through the normalisation of the weights."""
        judge_drop_gradients(reading, tally)

    @requirement("DROP-10", run=ExchangeStep(), when=has_lost_tokens)
    def test_a_token_without_slots_has_no_output(self, reading: Reading, tally: Tally) -> None:
        """The experts' output for a token whose slots were all dropped is exactly zero."""
        judge_lost_tokens(reading, tally)

    @requirement("DROP-10", run=LayerStep(drops=True))
    def test_a_token_without_slots_keeps_its_shared_part(self, reading: Reading, tally: Tally) -> None:
        """In a whole layer the output of a token whose slots were all dropped is that of its shared experts."""
        judge_lost_in_layer(reading, tally)

    @requirement("DROP-11", run=LayerStep(drops=True))
    def test_a_layer_learns_from_kept_slots_alone(self, reading: Reading, tally: Tally) -> None:
        """In a whole layer tokens and parameters have the gradients of the kept slots and of the shared experts."""
        judge_dropped_in_layer(reading, tally)

    @requirement("DROP-11", run=ExchangeStep(), when=has_empty_slots)
    def test_a_dropped_slot_has_no_gradient(self, reading: Reading, tally: Tally) -> None:
        """The gradient of a dropped slot's weight is zero, and its token receives no gradient through it."""
        judge_dropped_gradients(reading, tally)

    @requirement("DROP-11", run=ExpertsStep(), when=has_empty_slots)
    def test_experts_do_not_learn_from_dropped_slots(self, reading: Reading, tally: Tally) -> None:
        """The gradient of every expert is that of the slots that were kept."""
        judge_expert_gradients(reading, tally)
