"""EXCH: tokens held by all ranks of a tp group."""

from __future__ import annotations

from moe_conformance.chapters.tp_duplicated_tokens.judge import (
    judge_copies_answered,
    judge_copies_asked,
    judge_copies_claimed,
    judge_copies_counted,
    judge_copies_delivered,
    judge_mismatch,
    judge_own_copies_answered,
)
from moe_conformance.chapters.tp_duplicated_tokens.workloads import mismatched
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ON_EXCHANGE, ExchangeStep, ExpertsStep


class TestCopies:
    @requirement("EXCH-35", run=ExchangeStep(tokens="duplicated"))
    def test_copies_are_delivered_once(self, reading: Reading, tally: Tally) -> None:
        """A pair is delivered at most once in each exchange group, however many tp ranks hold the token."""
        judge_copies_delivered(reading, tally)

    @requirement("EXCH-35", run=ExpertsStep(tokens="duplicated"))
    def test_copies_count_once(self, reading: Reading, tally: Tally) -> None:
        """The experts' finished gradients are those of distinct tokens."""
        judge_copies_counted(reading, tally)

    @requirement("EXCH-36", run=ExchangeStep(tokens="duplicated"))
    def test_every_copy_is_answered(self, reading: Reading, tally: Tally) -> None:
        """The output is complete and bitwise equal on every tp rank; gradients are complete, or parts as declared."""
        judge_copies_answered(reading, tally)

    @requirement("EXCH-36", run=ExchangeStep(tokens="duplicated", unasked=True))
    def test_every_copy_gets_the_gradients_it_asks_for(self, reading: Reading, tally: Tally) -> None:
        """Where x or the weights ask for none, the gradients of the other are complete, or parts as declared."""
        judge_copies_asked(reading, tally)

    @requirement("EXCH-36", run=ExpertsStep(tokens="duplicated"))
    def test_every_copy_is_answered_by_own_experts(self, reading: Reading, tally: Tally) -> None:
        """With the backend's experts too."""
        judge_own_copies_answered(reading, tally)

    @requirement("EXCH-04", run=ExchangeStep(tokens="duplicated"))
    def test_counts_are_those_of_distinct_tokens(self, reading: Reading, tally: Tally) -> None:
        """The reported tokens per expert count a pair once, not once per tp rank."""
        judge_copies_claimed(reading, tally)

    @requirement("EXCH-07", run=ExchangeStep(tokens="duplicated"))
    def test_every_copy_has_the_form_of_the_input(self, reading: Reading, tally: Tally) -> None:
        """The output has the input's shape and dtype on every tp rank."""
        judge_form(reading, tally)

    @requirement("EXCH-07", run=ExpertsStep(tokens="duplicated"))
    def test_every_copy_of_own_experts_has_the_form_of_the_input(self, reading: Reading, tally: Tally) -> None:
        """With the backend's experts too."""
        judge_form(reading, tally)

    @requirement("EXCH-08", run=ExchangeStep(tokens="duplicated"))
    def test_inputs_of_every_copy_are_left_alone(self, reading: Reading, tally: Tally) -> None:
        """Tokens, ids, weights and upstream gradients hold the same bytes on every tp rank after the step."""
        judge_inputs(reading, tally)


class TestMismatch:
    @requirement("EXCH-37", run=ON_EXCHANGE, when=mismatched)
    def test_copies_that_differ_are_refused(self, outcome: Outcome, tally: Tally) -> None:
        """Where tp ranks have different routings for the same token, every rank of the tp group raises."""
        judge_mismatch(outcome, tally)
