"""LOAD: overload factors of steps, as a meter reports them."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.chapters.overload.judge import around
from moe_conformance.chapters.overload.judge.reports import (
    ALL,
    AVERAGE,
    CUMULATIVE,
    MAXIMUM,
    judge_names,
    judge_uneven,
    judge_values,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload

_METER = Script("load_meter")


def named(*names: str) -> Callable[[Workload], bool]:
    """Select scripts."""
    return lambda workload: workload.name in names


class TestFactorOfAnEntry:
    @requirement("LOAD-01", run=_METER, when=named("load-entries"))
    def test_the_most_loaded_rank_over_the_balanced_share(self, outcome: Outcome, tally: Tally) -> None:
        """A step of one entry has the factor of that entry for its average and its maximum."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM)

    @requirement("LOAD-02", run=_METER, when=lambda w: w.name == "load-entries" and w.layout.etp > 1)
    def test_shards_of_an_expert_count_all_of_its_pairs(self, outcome: Outcome, tally: Tally) -> None:
        """Behind etp shards the factor is 1 under perfect balance too."""
        judge_values(outcome, tally, MAXIMUM)

    @requirement("LOAD-05", run=_METER, when=named("load-dropped"))
    def test_dropped_pairs_are_no_load(self, outcome: Outcome, tally: Tally) -> None:
        """A dropped pair counts on no rank, and its token counts in the balanced share."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM)


class TestReportOfAStep:
    @requirement("LOAD-06", run=_METER, when=named("load-steps"))
    def test_the_average_weighs_entries_alike(self, outcome: Outcome, tally: Tally) -> None:
        """The average is the mean of the factors of all entries of the stage."""
        judge_values(outcome, tally, AVERAGE)

    @requirement("LOAD-07", run=_METER, when=named("load-steps"))
    def test_the_maximum_is_that_of_the_world(self, outcome: Outcome, tally: Tally) -> None:
        """The maximum is the largest factor of all entries of all stages."""
        judge_values(outcome, tally, MAXIMUM)

    @requirement("LOAD-08", run=_METER, when=named("load-steps"))
    def test_the_cumulative_maximum_follows_the_schedule(self, outcome: Outcome, tally: Tally) -> None:
        """The cumulative factor is the peak of the pairs held over the peak of the balanced count."""
        judge_values(outcome, tally, CUMULATIVE)

    @requirement("LOAD-09", run=_METER, when=named("load-uneven-tokens"))
    def test_the_balanced_peak_is_that_of_the_group(self, outcome: Outcome, tally: Tally) -> None:
        """Pairs of uneven tokens that arrive evenly give a cumulative factor of 1."""
        judge_values(outcome, tally, CUMULATIVE)

    @requirement("LOAD-10", run=_METER, when=named("load-steps"))
    def test_the_largest_rank_is_found_entry_by_entry(self, outcome: Outcome, tally: Tally) -> None:
        """Hot ranks that differ from entry to entry are not averaged away."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM, "layers")

    @requirement("LOAD-11", run=_METER, when=named("load-steps"))
    def test_layers_may_be_used_unevenly(self, outcome: Outcome, tally: Tally) -> None:
        """A step in which one layer has three entries and another two has the values of these five."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM, CUMULATIVE, "layers")

    @requirement("LOAD-24", run=_METER, when=named("load-steps"))
    def test_layers_have_their_own_values(self, outcome: Outcome, tally: Tally) -> None:
        """Every layer that recorded has its own mean and maximum, and no other layer has any."""
        judge_values(outcome, tally, "layers")

    @requirement("LOAD-25", run=_METER, when=named("load-steps"))
    def test_values_have_the_usual_names(self, outcome: Outcome, tally: Tally) -> None:
        """Reports have exactly the required names, with one prefix, and the number of their step."""
        judge_names(outcome, tally)


class TestWhatAReportCovers:
    @requirement("LOAD-17", run=_METER, when=named("load-alone"))
    def test_forwards_without_a_backward_leave_nothing_in_flight(self, outcome: Outcome, tally: Tally) -> None:
        """A training forward without a backward counts in average and maximum, and raises no later peak."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM, CUMULATIVE)

    @requirement("LOAD-18", run=_METER, when=named("load-evaluation"))
    def test_evaluation_is_left_out(self, outcome: Outcome, tally: Tally) -> None:
        """Passes in evaluation mode change no value of a training report."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM, CUMULATIVE, "layers")

    @requirement("LOAD-28", run=_METER, when=named("load-abandoned"))
    def test_an_abandoned_attempt_is_discarded(self, outcome: Outcome, tally: Tally) -> None:
        """The report after a repeated attempt covers that attempt only."""
        judge_values(outcome, tally, AVERAGE, MAXIMUM, CUMULATIVE, "layers")

    @requirement("LOAD-23", run=_METER, when=named("load-two-meters", "load-switched"))
    def test_a_report_covers_its_own_step(self, outcome: Outcome, tally: Tally) -> None:
        """Every report has the passes since the one before it, and none of another meter's."""
        judge_values(outcome, tally, *ALL)


class TestWhatIsNoLoad:
    @requirement("LOAD-03", run=_METER, when=named("load-forms", "load-padded-tokens", "load-copies"))
    def test_tokens_are_counted_where_they_come_from(self, outcome: Outcome, tally: Tally) -> None:
        """No dispatcher, padding or shape changes what a step of the same tokens and routing reports."""
        judge_values(outcome, tally, *ALL)

    @requirement("LOAD-04", run=_METER, when=named("load-forms", "load-padded-tokens", "load-padded-experts"))
    def test_padding_is_no_load(self, outcome: Outcome, tally: Tally) -> None:
        """Neither padding among the tokens nor rows that an exchange adds count."""
        judge_values(outcome, tally, *ALL)

    @requirement("LOAD-16", run=_METER, when=named("load-recomputed"))
    def test_recomputation_counts_once(self, outcome: Outcome, tally: Tally) -> None:
        """A forward that is repeated for its backward is one entry."""
        judge_values(outcome, tally, *ALL)


class TestWhoTakesPart:
    @requirement("LOAD-12", run=_METER, when=named("load-uneven-ranks"))
    def test_uneven_ranks_end_alike(self, outcome: Outcome, tally: Tally) -> None:
        """Ranks that recorded different numbers of entries report right values, or all of them raise."""
        judge_uneven(outcome, tally)

    @requirement("LOAD-13", run=_METER, when=named("load-idle-stage"))
    def test_ranks_without_entries_take_part(self, outcome: Outcome, tally: Tally) -> None:
        """A stage without entries changes nothing of what others report."""
        judge_values(outcome, tally, *ALL)

    @requirement("LOAD-15", run=_METER, when=named("load-received-nothing", "load-steps"))
    def test_every_pass_is_recorded_once(self, outcome: Outcome, tally: Tally) -> None:
        """Forwards and backwards are recorded once each, also on ranks that receive no row."""
        judge_values(outcome, tally, *ALL)


class TestHowPassesAreRecorded:
    @requirement("LOAD-14", run=_METER, when=named("load-entries", "load-steps"))
    def test_values_are_exact_but_for_rounding(self, outcome: Outcome, tally: Tally) -> None:
        """Every value is finite and within rounding of the exact one, also where no rank has a token."""
        judge_values(outcome, tally, *ALL)

    @requirement("LOAD-19", run=_METER, when=named("load-steps"))
    def test_counts_are_those_of_their_time(self, outcome: Outcome, tally: Tally) -> None:
        """What later microbatches count changes no entry that was recorded before."""
        judge_values(outcome, tally, *ALL)

    @requirement("LOAD-20", run=_METER, when=named("load-steps"))
    def test_events_are_in_the_order_of_the_passes(self, outcome: Outcome, tally: Tally) -> None:
        """Peaks are those of the schedule: all forwards first, 1F1B, or interleaved virtual stages."""
        judge_values(outcome, tally, CUMULATIVE)


class TestWhatAMeterCosts:
    @requirement("LOAD-21", run=_METER, when=named("load-switched"))
    def test_metering_changes_no_bit(self, outcome: Outcome, tally: Tally) -> None:
        """Outputs and gradients are the same with the meter on and off."""
        around.judge_same_results(outcome, tally)

    @requirement("LOAD-22", run=_METER, when=named("load-switched"))
    def test_metering_adds_no_collective_to_passes(self, outcome: Outcome, tally: Tally) -> None:
        """Passes call the same collectives with the meter on and off; off, a report calls none and has no value."""
        around.judge_same_collectives(outcome, tally)
        judge_values(outcome, tally, *ALL)

    @requirement("LOAD-26", run=_METER, when=named("load-steps"))
    def test_collectives_of_a_report_do_not_grow(self, outcome: Outcome, tally: Tally) -> None:
        """A report of many entries calls as many collectives as one of one entry."""
        around.judge_constant_collectives(outcome, tally)

    @requirement("LOAD-27", run=_METER, when=named("load-steps"))
    def test_a_report_takes_few_collectives(self, outcome: Outcome, tally: Tally) -> None:
        """A report calls at most five collectives."""
        around.judge_few_collectives(outcome, tally)


class TestCounters:
    @requirement("LOAD-29", run=_METER, when=named("load-recomputed"))
    def test_pairs_of_every_expert(self, outcome: Outcome, tally: Tally) -> None:
        """A counter has the routed pairs of every expert in training, without padding, each forward once."""
        around.judge_counters(outcome, tally)

    @requirement("LOAD-30", run=_METER, when=named("load-recomputed", "load-steps"))
    def test_the_trace_is_what_dispatch_received(self, outcome: Outcome, tally: Tally) -> None:
        """A trace has one record for every forward, of the experts that dispatch received."""
        around.judge_trace(outcome, tally)
