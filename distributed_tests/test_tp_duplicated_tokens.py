"""EXCH: tokens held by all ranks of a tp group."""

from __future__ import annotations

from moe_conformance.chapters.tp_duplicated_tokens.judge import (
    judge_copies_claimed,
    judge_copies_counted,
    judge_copies_delivered,
    judge_expert_results_of_copies,
    judge_mismatch,
    judge_required_gradients_of_copies,
    judge_results_of_copies,
)
from moe_conformance.chapters.tp_duplicated_tokens.workloads import mismatched
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ON_EXCHANGE, ExchangeStep, ExpertsStep


class TestCopies:
    test_copies_are_delivered_once = Row("EXCH-35", ExchangeStep(tokens="duplicated"), judge_copies_delivered)
    """A pair is delivered at most once in each exchange group, however many tp ranks hold the token."""

    test_copies_count_once = Row("EXCH-35", ExpertsStep(tokens="duplicated"), judge_copies_counted)
    """The experts' finished gradients are those of distinct tokens."""

    test_every_copy_is_answered = Row("EXCH-36", ExchangeStep(tokens="duplicated"), judge_results_of_copies)
    """The output is complete and bitwise equal on every tp rank; gradients are complete, or parts as declared."""

    test_every_copy_gets_the_gradients_it_asks_for = Row(
        "EXCH-36", ExchangeStep(tokens="duplicated", unasked=True), judge_required_gradients_of_copies
    )
    """Where x or the weights ask for none, the gradients of the other are complete, or parts as declared."""

    test_every_copy_is_answered_by_own_experts = Row(
        "EXCH-36", ExpertsStep(tokens="duplicated"), judge_expert_results_of_copies
    )
    """With the backend's experts too."""

    test_counts_are_those_of_distinct_tokens = Row("EXCH-04", ExchangeStep(tokens="duplicated"), judge_copies_claimed)
    """The reported tokens per expert count a pair once, not once per tp rank."""

    test_every_copy_has_the_form_of_the_input = Row("EXCH-07", ExchangeStep(tokens="duplicated"), judge_form)
    """The output has the input's shape and dtype on every tp rank."""

    test_every_copy_of_own_experts_has_the_form_of_the_input = Row(
        "EXCH-07", ExpertsStep(tokens="duplicated"), judge_form
    )
    """With the backend's experts too."""

    test_inputs_of_every_copy_are_left_alone = Row("EXCH-08", ExchangeStep(tokens="duplicated"), judge_inputs)
    """Tokens, ids, weights and upstream gradients hold the same bytes on every tp rank after the step."""


class TestMismatch:
    test_copies_that_differ_are_refused = Row("EXCH-37", ON_EXCHANGE, judge_mismatch, when=mismatched)
    """Where tp ranks have different routings for the same token, every rank of the tp group raises."""
