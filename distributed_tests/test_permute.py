"""EXCH and ROUTE: what one rank does to rows and routings by itself, without an exchange."""

from __future__ import annotations

from moe_conformance.chapters.permute.judge.permute import (
    judge_gradients_beside_padding,
    judge_order,
    judge_padding_rows,
    judge_permutation_gradients,
    judge_permuted,
    judge_unpermuted,
)
from moe_conformance.chapters.permute.judge.routing_map import judge_forms
from moe_conformance.chapters.permute.judge.row_order import judge_reordering, judge_row_index
from moe_conformance.chapters.permute.workloads import pads
from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import Script


class TestPermutation:
    @requirement("EXCH-18", run=Script("permutation"))
    def test_segments_hold_their_pairs_and_then_padding(self, outcome: Outcome, tally: Tally) -> None:
        """Every expert's rows are its pairs, padded to the smallest multiple that holds them."""
        judge_permuted(outcome, tally)

    @requirement("EXCH-02", run=Script("permutation"), when=pads)
    def test_padding_rows_are_zero(self, outcome: Outcome, tally: Tally) -> None:
        """Padding rows of an expert are zeros."""
        judge_padding_rows(outcome, tally)

    @requirement("EXCH-21", run=Script("permutation"))
    def test_rows_of_an_expert_stand_in_order(self, outcome: Outcome, tally: Tally) -> None:
        """The rows of an expert are sorted by token, then slot."""
        judge_order(outcome, tally)

    @requirement("EXCH-05", run=Script("permutation"))
    def test_tokens_get_the_weighted_sum_of_their_rows(self, outcome: Outcome, tally: Tally) -> None:
        """Unpermute adds to every token the rows of its own pairs, each times its weight, and no padding row."""
        judge_unpermuted(outcome, tally)

    @requirement("GRAD-02", "GRAD-03", run=Script("permutation"))
    def test_gradients_are_those_of_the_sum(self, outcome: Outcome, tally: Tally) -> None:
        """Gradients of tokens, rows and weights are those of their own pairs."""
        judge_permutation_gradients(outcome, tally)

    @requirement("GRAD-09", run=Script("permutation"), when=pads)
    def test_gradients_of_padding_rows_reach_nothing(self, outcome: Outcome, tally: Tally) -> None:
        """Large gradients at padding rows, and large numbers in them, change no gradient of a token or a weight."""
        judge_gradients_beside_padding(outcome, tally)

    @requirement("EXCH-08", run=Script("permutation"))
    def test_arguments_are_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Tokens, routings, rows and upstream gradients hold the bytes that were given."""
        judge_arguments(outcome, tally)


class TestRowIndex:
    @requirement("EXCH-08", run=Script("row_index"))
    def test_arguments_are_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Neither permute nor unpermute changes its inputs."""
        judge_arguments(outcome, tally)

    @requirement("EXCH-19", run=Script("row_index"))
    def test_sentinels_give_and_add_nothing(self, outcome: Outcome, tally: Tally) -> None:
        """A sentinel (-1) gives a row of zeros, and adds nothing, whatever the other indices are."""
        judge_row_index(outcome, tally)


class TestReordering:
    @requirement("EXCH-08", run=Script("reordering"))
    def test_arguments_are_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Rows and counts hold the bytes that were given."""
        judge_arguments(outcome, tally)

    @requirement("EXCH-20", run=Script("reordering"))
    def test_rows_change_their_order_and_nothing_else(self, outcome: Outcome, tally: Tally) -> None:
        """Source-major rows are reordered to expert-major, and back."""
        judge_reordering(outcome, tally)


class TestRoutingForms:
    @requirement("EXCH-08", run=Script("routing_forms"))
    def test_arguments_are_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Conversion to the other routing form does not change its input."""
        judge_arguments(outcome, tally)

    @requirement("ROUTE-21", run=Script("routing_forms"))
    def test_both_forms_name_the_same_triples(self, outcome: Outcome, tally: Tally) -> None:
        """Routings converted to a dense map and back keep tokens, experts and weights, with their gradients."""
        judge_forms(outcome, tally)
