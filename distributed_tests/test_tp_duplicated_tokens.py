"""EXCH, where the ranks of a tp group hold the same tokens as copies."""

from __future__ import annotations

from moe_conformance.judging.exchange.outputs import judge_form, judge_inputs
from moe_conformance.judging.exchange.tp_duplicated_tokens import (
    judge_copies_answered,
    judge_copies_claimed,
    judge_copies_counted,
    judge_copies_delivered,
    judge_mismatch,
    judge_own_copies_answered,
)
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.corpus.tp_duplicated_tokens import mismatched


class TestCopies:
    @requirement("EXCH-35", kind="copies")
    def test_copies_are_delivered_once(self, reading: Reading, tally: Tally) -> None:
        """A pair is handed to its expert once in each exchange group at most, however many ranks have a copy."""
        judge_copies_delivered(reading, tally)

    @requirement("EXCH-35", kind="copies experts")
    def test_copies_count_once(self, reading: Reading, tally: Tally) -> None:
        """The experts' finished gradients are those of distinct tokens."""
        judge_copies_counted(reading, tally)

    @requirement("EXCH-36", kind="copies")
    def test_every_copy_is_answered(self, reading: Reading, tally: Tally) -> None:
        """The output is whole and of the same bytes on every copy, and gradients are whole, or parts as declared."""
        judge_copies_answered(reading, tally)

    @requirement("EXCH-36", kind="copies experts")
    def test_every_copy_is_answered_by_own_experts(self, reading: Reading, tally: Tally) -> None:
        """Of the backend's own experts too."""
        judge_own_copies_answered(reading, tally)

    @requirement("EXCH-04", kind="copies")
    def test_counts_are_those_of_distinct_tokens(self, reading: Reading, tally: Tally) -> None:
        """What a backend claims to hand to every expert counts no pair once per copy."""
        judge_copies_claimed(reading, tally)

    @requirement("EXCH-07", kind="copies")
    def test_every_copy_has_the_form_of_the_input(self, reading: Reading, tally: Tally) -> None:
        """The output has the input's shape and dtype on every copy."""
        judge_form(reading, tally)

    @requirement("EXCH-07", kind="copies experts")
    def test_every_copy_of_own_experts_has_the_form_of_the_input(self, reading: Reading, tally: Tally) -> None:
        """Behind the backend's own experts too."""
        judge_form(reading, tally)

    @requirement("EXCH-08", kind="copies")
    def test_inputs_of_every_copy_are_left_alone(self, reading: Reading, tally: Tally) -> None:
        """Tokens, ids, weights and upstream gradients hold the same bytes on every copy after the step."""
        judge_inputs(reading, tally)


class TestMismatch:
    @requirement("EXCH-37", kind="exchange", when=mismatched)
    def test_copies_that_differ_are_refused(self, outcome: Outcome, tally: Tally) -> None:
        """Where the copies of a token have different routings, every rank of the tp group raises."""
        judge_mismatch(outcome, tally)
