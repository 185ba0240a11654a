"""LOAD: overload factors of steps, as a meter reports them."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.judging.overload.reports import AVERAGE, CUMULATIVE, MAXIMUM, judge_names, judge_values
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload

_METER = Script("load_meter")


def named(name: str) -> Callable[[Workload], bool]:
    """Select one script."""
    return lambda workload: workload.name == name


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
