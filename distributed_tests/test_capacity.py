"""DROP and EXCH: which slots experts drop, with the effect on outputs and gradients; receive buffers of fixed size."""

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
from moe_conformance.chapters.capacity.judge.receive_budget import judge_budget, judge_fixed_size
from moe_conformance.chapters.capacity.judge.token_drops import (
    judge_dropped_in_layer,
    judge_kept_in_layer,
    judge_lost_in_layer,
)
from moe_conformance.chapters.capacity.workloads.budget_overflow import by_factor, drops, refuses, refuses_some
from moe_conformance.chapters.capacity.workloads.routers import fits_all, others_change
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import RESULTS
from moe_conformance.judging.shared.experts.experts import EXPERT_RESULTS, judge_expert_gradients
from moe_conformance.judging.shared.router.capacity import (
    judge_capacity,
    judge_filled_load,
    judge_fit,
    judge_independent_drops,
    judge_lossless,
    judge_minimum,
    judge_policy,
)
from moe_conformance.judging.shared.router.drop_weights import judge_drop_gradients, judge_drop_weights
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import has_empty_slots, has_lost_tokens, somebody_gets_all
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep, RouterStep
from moe_conformance.workloads.records.workload import Workload


def has_budget(workload: Workload) -> bool:
    """Whether the receive buffer has a stated size."""
    return workload.config.receive_buffer.factor is not None


class TestRoom:
    test_the_capacity_is_the_mean_load_times_the_factor = Row(
        "DROP-01", RouterStep(capacity=True), judge_capacity, when=lambda workload: not workload.config.capacity.minimum
    )
    """For every expert a rank keeps as many slots as the capacity, or all where there are fewer."""

    test_the_minimum_is_the_least_capacity = Row(
        "DROP-02", RouterStep(capacity=True), judge_minimum, when=lambda workload: workload.config.capacity.minimum > 0
    )
    """Where the formula gives less, the configured minimum is the capacity."""

    test_experts_keep_as_many_as_fit = Row("DROP-03", RouterStep(capacity=True), judge_fit)
    """With every drop policy, a slot is dropped only where its expert is at capacity."""

    test_room_for_all_changes_nothing = Row("DROP-04", RouterStep(capacity=True), judge_lossless, when=fits_all)
    """A capacity of at least the largest load gives the ids and weights of no capacity."""


class TestChoice:
    test_the_heaviest_stay = Row(
        "DROP-05",
        RouterStep(capacity=True),
        judge_policy,
        when=lambda workload: workload.config.capacity.drop_policy == "weights",
    )
    """With policy "probs", no dropped slot has a larger weight than a kept one of the same expert."""

    test_the_first_stay = Row(
        "DROP-06",
        RouterStep(capacity=True),
        judge_policy,
        when=lambda workload: workload.config.capacity.drop_policy == "position",
    )
    """With policy "position", no dropped slot comes before a kept one of the same expert."""

    test_a_rank_drops_by_its_own_tokens = Row(
        "DROP-07", RouterStep(capacity=True), judge_independent_drops, when=others_change
    )
    """The slots that a rank drops do not depend on the tokens of other ranks."""


class TestFilledUp:
    test_a_capacity_that_drops_nothing_is_the_largest_load = Row(
        "DROP-08",
        ExchangeStep(option="capacity padding"),
        (judge_lossless_capacity, judge_reduced_once),
        when=lambda workload: workload.config.capacity.factor is None,
    )
    """Experts receive the largest load of the group from each rank; the group all-reduces (MAX) it at most once."""

    test_rows_that_fill_up_change_nothing = Row("DROP-12", ExchangeStep(option="capacity padding"), judge_filled)
    """With capacity.padded every expert receives capacity rows; the padding changes no output and no gradient."""

    test_experts_do_not_learn_from_rows_that_fill_up = Row(
        "DROP-12", ExpertsStep(), EXPERT_RESULTS, when=lambda workload: workload.config.capacity.padded
    )
    """With the backend's experts, padding to capacity changes no output and no gradient."""

    test_rows_that_fill_up_are_no_load = Row(
        "DROP-12", RouterStep(capacity=True), judge_filled_load, when=lambda workload: workload.config.capacity.padded
    )
    """The load that a router reports counts the selected slots, or the kept ones."""

    test_the_worst_case_fits = Row("DROP-13", ExchangeStep(), judge_worst_case, when=somebody_gets_all)
    """A rank whose experts are selected by as many slots of all tokens as possible receives every row."""


class TestBudget:
    test_nothing_is_lost_without_a_word = Row(
        "DROP-14", ExchangeStep(option="receive budget"), judge_reported, when=by_factor
    )
    """With receive_buffer.factor, a row that was not delivered was refused or reported as dropped."""

    test_an_exceeded_budget_is_reported_and_no_other = Row(
        "DROP-14", ExchangeStep(option="receive budget"), judge_overflow, when=refuses
    )
    """An overflow of the receive buffer is reported if and only if more rows are routed to it than it holds."""

    test_what_fits_is_exact_after_what_did_not = Row(
        "DROP-15", ExchangeStep(option="receive budget"), judge_after_overflow, when=refuses_some
    )
    """More rows than the receive buffer holds raise on all ranks, and the next microbatch is correct."""

    test_a_full_buffer_is_flagged_and_no_other = Row(
        "DROP-14", ExchangeStep(option="receive budget"), judge_flags, when=drops
    )
    """With receive_buffer.overflow="drop", a rank reports an overflow if and only if rows do not fit."""

    test_dropped_rows_count_nowhere = Row(
        "DROP-15", ExchangeStep(option="receive budget"), judge_dropped_rows, when=drops
    )
    """A row over the receive buffer is dropped on all etp ranks, in outputs and gradients; no other row is."""

    test_a_full_buffer_is_full = Row("DROP-16", ExchangeStep(option="receive budget"), judge_room_left, when=drops)
    """No row is dropped while the receive buffer has room for it."""

    # judge_fixed_size is last: it raises NotOffered if no size is visible, when all else has been judged.
    test_a_fixed_buffer_changes_nothing = Row(
        "EXCH-22", ExchangeStep(), (judge_deliveries, judge_rows, *RESULTS, judge_fixed_size), when=has_budget
    )
    """The receive buffer keeps its size; deliveries, outputs and gradients are those of a buffer of exact size."""

    test_a_fixed_buffer_changes_nothing_for_experts = Row("EXCH-22", ExpertsStep(), EXPERT_RESULTS, when=has_budget)
    """With the backend's experts too; rows of no token change no gradient of a parameter."""

    test_a_budget_holds_the_load_that_it_states = Row(
        "EXCH-25", ExchangeStep(), (judge_deliveries, judge_budget), when=has_budget
    )
    """The receive buffer holds the stated multiple of the balanced load; no row of such a load is dropped."""


class TestConsequences:
    test_kept_slots_keep_their_weights = Row("DROP-09", RouterStep(capacity=True), judge_drop_weights)
    """The weights of kept slots are those before the drop."""

    test_kept_slots_add_the_same_in_a_layer = Row(
        "DROP-09",
        LayerStep(drops=True),
        judge_kept_in_layer,
        when=lambda workload: bool(workload.config.capacity.factor),
    )
    """In a whole layer the output of a token is the sum of its kept slots, with the weights before the drop."""

    test_kept_slots_alone_give_gradients = Row("DROP-11", RouterStep(capacity=True), judge_drop_gradients)
    """A dropped slot gives its token and the router no gradient except through the normalisation of the weights."""

    test_a_token_without_slots_has_no_output = Row("DROP-10", ExchangeStep(), judge_lost_tokens, when=has_lost_tokens)
    """The experts' output for a token whose slots were all dropped is exactly zero."""

    test_a_token_without_slots_keeps_its_shared_part = Row("DROP-10", LayerStep(drops=True), judge_lost_in_layer)
    """In a whole layer the output of a token whose slots were all dropped is that of its shared experts."""

    test_a_layer_learns_from_kept_slots_alone = Row("DROP-11", LayerStep(drops=True), judge_dropped_in_layer)
    """In a whole layer tokens and parameters have the gradients of the kept slots and of the shared experts."""

    test_a_dropped_slot_has_no_gradient = Row("DROP-11", ExchangeStep(), judge_dropped_gradients, when=has_empty_slots)
    """The gradient of a dropped slot's weight is zero, and its token receives no gradient through it."""

    test_experts_do_not_learn_from_dropped_slots = Row(
        "DROP-11", ExpertsStep(), judge_expert_gradients, when=has_empty_slots
    )
    """The gradient of every expert is that of the slots that were kept."""
