"""EXCH and ROUTE: what one rank does to rows and routings by itself, without an exchange."""

from __future__ import annotations

from moe_conformance.chapters.permute.judge.permute import (
    judge_gradients_with_padding,
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
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import Script


class TestPermutation:
    test_segments_hold_their_pairs_and_then_padding = Row("EXCH-18", Script("permutation"), judge_permuted)
    """Every expert's rows are its pairs, padded to the smallest multiple that holds them."""

    test_padding_rows_are_zero = Row("EXCH-02", Script("permutation"), judge_padding_rows, when=pads)
    """Padding rows of an expert are zeros."""

    test_rows_of_an_expert_stand_in_order = Row("EXCH-21", Script("permutation"), judge_order)
    """The rows of an expert are sorted by token, then slot."""

    test_tokens_get_the_weighted_sum_of_their_rows = Row("EXCH-05", Script("permutation"), judge_unpermuted)
    """Unpermute adds to every token the rows of its own pairs, each times its weight, and no padding row."""

    test_gradients_are_those_of_the_sum = Row(
        ("GRAD-02", "GRAD-03"), Script("permutation"), judge_permutation_gradients
    )
    """Gradients of tokens, rows and weights are those of their own pairs."""

    test_gradients_of_padding_rows_reach_nothing = Row(
        "GRAD-09", Script("permutation"), judge_gradients_with_padding, when=pads
    )
    """Large gradients at padding rows, and large numbers in them, change no gradient of a token or a weight."""

    test_arguments_are_left_alone = Row("EXCH-08", Script("permutation"), judge_arguments)
    """Tokens, routings, rows and upstream gradients hold the bytes that were given."""


class TestRowIndex:
    test_arguments_are_left_alone = Row("EXCH-08", Script("row_index"), judge_arguments)
    """Neither permute nor unpermute changes its inputs."""

    test_sentinels_give_and_add_nothing = Row("EXCH-19", Script("row_index"), judge_row_index)
    """A sentinel (-1) gives a row of zeros, and adds nothing, whatever the other indices are."""


class TestReordering:
    test_arguments_are_left_alone = Row("EXCH-08", Script("reordering"), judge_arguments)
    """Rows and counts hold the bytes that were given."""

    test_rows_change_their_order_and_nothing_else = Row("EXCH-20", Script("reordering"), judge_reordering)
    """Source-major rows are reordered to expert-major, and back."""


class TestRoutingForms:
    test_arguments_are_left_alone = Row("EXCH-08", Script("routing_forms"), judge_arguments)
    """Conversion to the other routing form does not change its input."""

    test_both_forms_name_the_same_triples = Row("ROUTE-21", Script("routing_forms"), judge_forms)
    """Routings converted to a dense map and back keep tokens, experts and weights, with their gradients."""
