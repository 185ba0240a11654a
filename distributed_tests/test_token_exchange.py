"""EXCH: fused token exchanges: handles that are reused or of another dispatch, sums of combine, dispatch layouts."""

from __future__ import annotations

from moe_conformance.chapters.token_exchange.judge.carried_weights import judge_travelling_weights
from moe_conformance.chapters.token_exchange.judge.fp8_wire import judge_float8_bytes, judge_float8_rows
from moe_conformance.chapters.token_exchange.judge.low_latency import judge_limit, judge_places
from moe_conformance.chapters.token_exchange.judge.token_exchange import judge_biases, judge_other_handle, judge_reuse
from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.shared.exchange.dispatch_layout import judge_dispatch_layout
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import exchanges
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload


def reuses(workload: Workload) -> bool:
    """Whether a handle serves several dispatches, or a backward comes behind another dispatch's combine."""
    return any(call.late or (call.method == "dispatch" and "handle" in call.given[0]) for call in workload.calls)


def takes_another(workload: Workload) -> bool:
    """Whether a combine gets the handle of another dispatch."""
    return any(call.may_raise for call in workload.calls)


def has_biases(workload: Workload) -> bool:
    """Whether combine gets biases."""
    return any("biases" in call.given[0] for call in workload.calls)


def weighs(workload: Workload) -> bool:
    """Whether tokens and the weights that are sent with them ask for gradients."""
    return any({"x_TD", "weights_TK"} == {*call.differentiable} for call in workload.calls)


def asks_apart(workload: Workload) -> bool:
    """Whether of tokens and weights that were sent, only one asks for a gradient."""
    return any(call.differentiable == ("weights_TK",) for call in workload.calls)


def within_limits(workload: Workload) -> bool:
    """Whether no rank has more tokens than the stated maximum."""
    return not breaks_limits(workload)


def breaks_limits(workload: Workload) -> bool:
    """Whether some rank does."""
    return any(call.may_raise for call in workload.calls)


def rounds(workload: Workload) -> bool:
    """Whether rows are sent in float8."""
    return workload.config.wire == "float8"


def rounds_for_others(workload: Workload) -> bool:
    """Whether rows that leave a rank are."""
    return rounds(workload) and exchanges(workload.layout)


class TestHandles:
    test_a_handle_serves_further_dispatches = Row("EXCH-27", Script("token_exchange"), judge_reuse, when=reuses)
    """A dispatch with an earlier handle delivers the new tokens to the same places; gradients pass through both."""

    test_the_handle_of_another_is_refused = Row(
        "EXCH-28", Script("token_exchange"), judge_other_handle, when=takes_another
    )
    """Another number of rows than the handle's is an error on every rank; the right handles can still be used."""


class TestCombine:
    test_biases_are_added_once = Row("EXCH-31", Script("token_exchange"), judge_biases, when=has_biases)
    """Every token has each bias added once and unweighted, also one that was sent nowhere."""


class TestWeights:
    test_weights_travel_both_ways = Row(
        ("EXCH-05", "GRAD-02", "GRAD-03"), Script("token_exchange"), judge_travelling_weights, when=weighs
    )
    """The output is the weighted sum of the expert outputs, and tokens and weights have its gradients."""

    test_weights_and_tokens_ask_apart = Row(
        "GRAD-15", Script("token_exchange"), judge_travelling_weights, when=asks_apart
    )
    """Weights have their gradient where tokens ask for none, and tokens where weights ask for none."""


class TestPlaces:
    test_the_first_places_are_filled = Row("EXCH-29", Script("places_exchange"), judge_places, when=within_limits)
    """The first places of an expert hold its rows, by source if so stated; no other place changes a result."""

    test_more_tokens_than_fit_are_refused = Row("EXCH-23", Script("places_exchange"), judge_limit, when=breaks_limits)
    """One token more than the stated maximum, on one rank or all, is an error on every rank; the maximum is not."""


class TestWire:
    test_rows_are_rounded_under_their_own_scales = Row(
        "EXCH-30", Script("token_exchange"), judge_float8_rows, when=rounds
    )
    """A row is received within the format's rounding error, with the scales of its own blocks."""

    test_eight_bits_are_what_travels = Row(
        "COST-09", Script("token_exchange"), judge_float8_bytes, when=rounds_for_others
    )
    """The bytes that leave a rank are those of the format, its scales, the ids and the weights."""


class TestArguments:
    test_a_token_exchange_leaves_them_alone = Row("EXCH-08", Script("token_exchange"), judge_arguments)
    """Tokens, ids, weights, biases and upstream gradients hold the bytes that were given."""

    test_an_exchange_of_places_leaves_them_alone = Row("EXCH-08", Script("places_exchange"), judge_arguments)
    """So they do where a dispatch is refused."""


class TestDispatchLayout:
    test_tokens_are_counted_for_ranks_nodes_and_experts = Row(
        "EXCH-26", Script("dispatch_layout"), judge_dispatch_layout
    )
    """A token counts once for each rank and node that it is sent to, and for an expert once per slot."""
