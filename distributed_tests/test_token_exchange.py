"""EXCH, of fused token exchanges: handles that are used again or are another's, and what combine adds."""

from __future__ import annotations

from moe_conformance.judging.kernels.carried_weights import judge_travelling_weights
from moe_conformance.judging.kernels.fp8_wire import judge_float8_bytes, judge_float8_rows
from moe_conformance.judging.kernels.low_latency import judge_limit, judge_places
from moe_conformance.judging.kernels.token_exchange import judge_biases, judge_other_handle, judge_reuse
from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.features import exchanges
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
    """Whether experts weigh what they answer by weights that travelled."""
    return workload.name.startswith("weighed")


def within_limits(workload: Workload) -> bool:
    """Whether no rank brings more tokens than were said to come."""
    return not breaks_limits(workload)


def breaks_limits(workload: Workload) -> bool:
    """Whether some rank does."""
    return workload.name.startswith("tokens-over-limit")


def rounds(workload: Workload) -> bool:
    """Whether rows travel in eight bits."""
    return workload.config.wire == "float8"


def rounds_for_others(workload: Workload) -> bool:
    """Whether rows that leave a rank do."""
    return rounds(workload) and exchanges(workload.layout)


class TestHandles:
    @requirement("EXCH-27", kind="token_exchange", when=reuses)
    def test_a_handle_serves_further_dispatches(self, outcome: Outcome, tally: Tally) -> None:
        """A dispatch by an earlier one's handle brings the new tokens to the old places; gradients go through both."""
        judge_reuse(outcome, tally)

    @requirement("EXCH-28", kind="token_exchange", when=takes_another)
    def test_the_handle_of_another_is_refused(self, outcome: Outcome, tally: Tally) -> None:
        """Rows that are not as many as the handle's are an error on every rank, and the right handles still serve."""
        judge_other_handle(outcome, tally)


class TestCombine:
    @requirement("EXCH-31", kind="token_exchange", when=has_biases)
    def test_biases_are_added_once(self, outcome: Outcome, tally: Tally) -> None:
        """Every token gets each bias once and unweighted, also one that went nowhere."""
        judge_biases(outcome, tally)


class TestWeights:
    @requirement("EXCH-05", "GRAD-02", "GRAD-03", kind="token_exchange", when=weighs)
    def test_weights_travel_both_ways(self, outcome: Outcome, tally: Tally) -> None:
        """Tokens get the weighed sum of their experts' answers, and tokens and weights the gradients of it."""
        judge_travelling_weights(outcome, tally)


class TestPlaces:
    @requirement("EXCH-29", kind="places_exchange", when=within_limits)
    def test_the_first_places_are_filled(self, outcome: Outcome, tally: Tally) -> None:
        """The first places of an expert hold its rows, by source where that is said; the others reach nothing."""
        judge_places(outcome, tally)

    @requirement("EXCH-23", kind="places_exchange", when=breaks_limits)
    def test_more_tokens_than_fit_are_refused(self, outcome: Outcome, tally: Tally) -> None:
        """One token more than was said to come, on one rank or on all, is an error on every rank; the limit is not."""
        judge_limit(outcome, tally)


class TestWire:
    @requirement("EXCH-30", kind="token_exchange", when=rounds)
    def test_rows_are_rounded_under_their_own_scales(self, outcome: Outcome, tally: Tally) -> None:
        """A row arrives within the format's rounding of itself, under scales that belong to its own blocks."""
        judge_float8_rows(outcome, tally)

    @requirement("COST-09", kind="token_exchange", when=rounds_for_others)
    def test_eight_bits_are_what_travels(self, outcome: Outcome, tally: Tally) -> None:
        """The bytes that leave a rank are those of the format, its scales, the ids and the weights."""
        judge_float8_bytes(outcome, tally)


class TestArguments:
    @requirement("EXCH-08", kind="token_exchange")
    def test_a_token_exchange_leaves_them_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Tokens, ids, weights, biases and upstream gradients hold the bytes that were given."""
        judge_arguments(outcome, tally)

    @requirement("EXCH-08", kind="places_exchange")
    def test_an_exchange_of_places_leaves_them_alone(self, outcome: Outcome, tally: Tally) -> None:
        """So they do where a dispatch is refused."""
        judge_arguments(outcome, tally)
