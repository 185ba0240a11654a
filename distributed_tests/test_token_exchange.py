"""EXCH: fused token exchanges: handles that are reused or of another dispatch, and the sum of combine."""

from __future__ import annotations

from moe_conformance.chapters.token_exchange.judge.carried_weights import judge_travelling_weights
from moe_conformance.chapters.token_exchange.judge.fp8_wire import judge_float8_bytes, judge_float8_rows
from moe_conformance.chapters.token_exchange.judge.low_latency import judge_limit, judge_places
from moe_conformance.chapters.token_exchange.judge.token_exchange import judge_biases, judge_other_handle, judge_reuse
from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.features import exchanges
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload


def reuses(workload: Workload) -> bool:
    """Whether a handle serves several dispatches."""
    return workload.name.startswith("reused-handle")


def takes_another(workload: Workload) -> bool:
    """Whether a combine gets the handle of another dispatch."""
    return workload.name.startswith("handle-of-another")


def has_biases(workload: Workload) -> bool:
    """Whether combine gets biases."""
    return workload.name.startswith("biases")


def weighs(workload: Workload) -> bool:
    """Whether experts multiply their output by weights that were sent with the rows."""
    return workload.name.startswith("weighed")


def asks_apart(workload: Workload) -> bool:
    """Whether of tokens and weights that were sent, only one asks for a gradient."""
    return workload.name.startswith("weights-asked-apart")


def within_limits(workload: Workload) -> bool:
    """Whether no rank has more tokens than the stated maximum."""
    return not breaks_limits(workload)


def breaks_limits(workload: Workload) -> bool:
    """Whether some rank does."""
    return workload.name.startswith("tokens-over-limit")


def rounds(workload: Workload) -> bool:
    """Whether rows are sent in float8."""
    return workload.config.wire == "float8"


def rounds_for_others(workload: Workload) -> bool:
    """Whether rows that leave a rank are."""
    return rounds(workload) and exchanges(workload.layout)


class TestHandles:
    @requirement("EXCH-27", run=Script("token_exchange"), when=reuses)
    def test_a_handle_serves_further_dispatches(self, outcome: Outcome, tally: Tally) -> None:
        """A dispatch with an earlier handle delivers the new tokens to the same places; gradients pass through both."""
        judge_reuse(outcome, tally)

    @requirement("EXCH-28", run=Script("token_exchange"), when=takes_another)
    def test_the_handle_of_another_is_refused(self, outcome: Outcome, tally: Tally) -> None:
        """Another number of rows than the handle's is an error on every rank; the right handles can still be used."""
        judge_other_handle(outcome, tally)


class TestCombine:
    @requirement("EXCH-31", run=Script("token_exchange"), when=has_biases)
    def test_biases_are_added_once(self, outcome: Outcome, tally: Tally) -> None:
        """Every token has each bias added once and unweighted, also one that was sent nowhere."""
        judge_biases(outcome, tally)


class TestWeights:
    @requirement("EXCH-05", "GRAD-02", "GRAD-03", run=Script("token_exchange"), when=weighs)
    def test_weights_travel_both_ways(self, outcome: Outcome, tally: Tally) -> None:
        """The output is the weighted sum of the expert outputs, and tokens and weights have its gradients."""
        judge_travelling_weights(outcome, tally)

    @requirement("GRAD-15", run=Script("token_exchange"), when=asks_apart)
    def test_weights_and_tokens_ask_apart(self, outcome: Outcome, tally: Tally) -> None:
        """Weights have their gradient where tokens ask for none, and tokens where weights ask for none."""
        judge_travelling_weights(outcome, tally)


class TestPlaces:
    @requirement("EXCH-29", run=Script("places_exchange"), when=within_limits)
    def test_the_first_places_are_filled(self, outcome: Outcome, tally: Tally) -> None:
        """The first places of an expert hold its rows, by source if so stated; no other place changes a result."""
        judge_places(outcome, tally)

    @requirement("EXCH-23", run=Script("places_exchange"), when=breaks_limits)
    def test_more_tokens_than_fit_are_refused(self, outcome: Outcome, tally: Tally) -> None:
        """One token more than the stated maximum, on one rank or all, is an error on every rank; the maximum is not."""
        judge_limit(outcome, tally)


class TestWire:
    @requirement("EXCH-30", run=Script("token_exchange"), when=rounds)
    def test_rows_are_rounded_under_their_own_scales(self, outcome: Outcome, tally: Tally) -> None:
        """A row is received within the format's rounding error, with the scales of its own blocks."""
        judge_float8_rows(outcome, tally)

    @requirement("COST-09", run=Script("token_exchange"), when=rounds_for_others)
    def test_eight_bits_are_what_travels(self, outcome: Outcome, tally: Tally) -> None:
        """The bytes that leave a rank are those of the format, its scales, the ids and the weights."""
        judge_float8_bytes(outcome, tally)


class TestArguments:
    @requirement("EXCH-08", run=Script("token_exchange"))
    def test_a_token_exchange_leaves_them_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Tokens, ids, weights, biases and upstream gradients hold the bytes that were given."""
        judge_arguments(outcome, tally)

    @requirement("EXCH-08", run=Script("places_exchange"))
    def test_an_exchange_of_places_leaves_them_alone(self, outcome: Outcome, tally: Tally) -> None:
        """So they do where a dispatch is refused."""
        judge_arguments(outcome, tally)
