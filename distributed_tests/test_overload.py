"""LOAD: overload factors of steps, as a meter reports them."""

from __future__ import annotations

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
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import shows
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload

_METER = Script("load_meter")


def shards_an_entry(workload: Workload) -> bool:
    """Whether a step has one entry, and experts are sharded over etp."""
    return shows("steps of one entry")(workload) and workload.layout.etp > 1


class TestFactorOfAnEntry:
    test_the_most_loaded_rank_over_the_balanced_share = Row(
        "LOAD-01", _METER, judge_values, AVERAGE, MAXIMUM, when=shows("steps of one entry")
    )
    """A step of one entry has the factor of that entry for its average and its maximum."""

    test_shards_of_an_expert_count_all_of_its_pairs = Row(
        "LOAD-02", _METER, judge_values, MAXIMUM, when=shards_an_entry
    )
    """Behind etp shards the factor is 1 under perfect balance too."""

    test_dropped_pairs_are_no_load = Row("LOAD-05", _METER, judge_values, AVERAGE, MAXIMUM, when=shows("dropped pairs"))
    """A dropped pair counts on no rank, and its token counts in the balanced share."""


class TestReportOfAStep:
    test_the_average_weighs_entries_alike = Row("LOAD-06", _METER, judge_values, AVERAGE, when=shows("schedules"))
    """The average is the mean of the factors of all entries of the stage."""

    test_the_maximum_is_that_of_the_world = Row("LOAD-07", _METER, judge_values, MAXIMUM, when=shows("schedules"))
    """The maximum is the largest factor of all entries of all stages."""

    test_the_cumulative_maximum_follows_the_schedule = Row(
        "LOAD-08", _METER, judge_values, CUMULATIVE, when=shows("schedules")
    )
    """The cumulative factor is the peak of the pairs held over the peak of the balanced count."""

    test_the_balanced_peak_is_that_of_the_group = Row(
        "LOAD-09", _METER, judge_values, CUMULATIVE, when=shows("uneven tokens")
    )
    """Pairs of uneven tokens that arrive evenly give a cumulative factor of 1."""

    test_the_largest_rank_is_found_entry_by_entry = Row(
        "LOAD-10", _METER, judge_values, AVERAGE, MAXIMUM, "layers", when=shows("schedules")
    )
    """Hot ranks that differ from entry to entry are not averaged away."""

    test_layers_may_be_used_unevenly = Row(
        "LOAD-11", _METER, judge_values, AVERAGE, MAXIMUM, CUMULATIVE, "layers", when=shows("uneven layers")
    )
    """A step in which one layer has three entries and another two has the values of these five."""

    test_layers_have_their_own_values = Row("LOAD-24", _METER, judge_values, "layers", when=shows("schedules"))
    """Every layer that recorded has its own mean and maximum, and no other layer has any."""

    test_values_have_the_usual_names = Row("LOAD-25", _METER, judge_names, when=shows("schedules"))
    """Reports have exactly the required names, with one prefix, and the number of their step."""


class TestWhatAReportCovers:
    test_forwards_without_a_backward_leave_nothing_in_flight = Row(
        "LOAD-17", _METER, judge_values, AVERAGE, MAXIMUM, CUMULATIVE, when=shows("no backward")
    )
    """A training forward without a backward counts in average and maximum, and raises no later peak."""

    test_evaluation_is_left_out = Row(
        "LOAD-18", _METER, judge_values, AVERAGE, MAXIMUM, CUMULATIVE, "layers", when=shows("evaluation")
    )
    """Passes in evaluation mode change no value of a training report."""

    test_an_abandoned_attempt_is_discarded = Row(
        "LOAD-28", _METER, judge_values, AVERAGE, MAXIMUM, CUMULATIVE, "layers", when=shows("abandoned attempt")
    )
    """The report after a repeated attempt covers that attempt only."""

    test_a_report_covers_its_own_step = Row(
        "LOAD-23", _METER, judge_values, *ALL, when=shows("another meter", "switching")
    )
    """Every report has the passes since the one before it, and none of another meter's."""


class TestWhatIsNoLoad:
    test_tokens_are_counted_where_they_come_from = Row(
        "LOAD-03", _METER, judge_values, *ALL, when=shows("forms of tokens")
    )
    """No dispatcher, padding or shape changes what a step of the same tokens and routing reports."""

    test_padding_is_no_load = Row("LOAD-04", _METER, judge_values, *ALL, when=shows("padding"))
    """Neither padding among the tokens nor rows that an exchange adds count."""

    test_recomputation_counts_once = Row("LOAD-16", _METER, judge_values, *ALL, when=shows("recomputation"))
    """A forward that is repeated for its backward is one entry."""


class TestWhoTakesPart:
    test_uneven_ranks_end_alike = Row("LOAD-12", _METER, judge_uneven, when=shows("uneven ranks"))
    """Ranks that recorded different numbers of entries report right values, or all of them raise."""

    test_ranks_without_entries_take_part = Row(
        "LOAD-13", _METER, judge_values, *ALL, when=shows("stages without entries")
    )
    """A stage without entries changes nothing of what others report."""

    test_every_pass_is_recorded_once = Row(
        "LOAD-15", _METER, judge_values, *ALL, when=shows("ranks without rows", "schedules")
    )
    """Forwards and backwards are recorded once each, also on ranks that receive no row."""


class TestHowPassesAreRecorded:
    test_values_are_exact_but_for_rounding = Row(
        "LOAD-14", _METER, judge_values, *ALL, when=shows("steps of one entry", "schedules")
    )
    """Every value is finite and within rounding of the exact one, also where no rank has a token."""

    test_counts_are_those_of_their_time = Row("LOAD-19", _METER, judge_values, *ALL, when=shows("reused buffers"))
    """Neither what later microbatches count nor what is written into their ids changes what was recorded."""

    test_events_are_in_the_order_of_the_passes = Row(
        "LOAD-20", _METER, judge_values, CUMULATIVE, when=shows("schedules")
    )
    """Peaks are those of the schedule: all forwards first, 1F1B, or interleaved virtual stages."""


class TestWhatAMeterCosts:
    test_metering_changes_no_bit = Row("LOAD-21", _METER, around.judge_same_results, when=shows("switching"))
    """Outputs and gradients are the same with the meter on and off."""

    test_metering_adds_no_collective_to_passes = Row(
        "LOAD-22", _METER, (around.judge_same_collectives, judge_values), *ALL, when=shows("switching")
    )
    """Passes call the same collectives with the meter on and off; off, a report calls none and has no value."""

    test_collectives_of_a_report_do_not_grow = Row(
        "LOAD-26", _METER, around.judge_constant_collectives, when=shows("schedules")
    )
    """A report of many entries calls as many collectives as one of one entry."""

    test_a_report_takes_few_collectives = Row("LOAD-27", _METER, around.judge_few_collectives, when=shows("schedules"))
    """A report calls at most five collectives."""


class TestCounters:
    test_pairs_of_every_expert = Row("LOAD-29", _METER, around.judge_counters, when=shows("recomputation"))
    """A counter has the routed pairs of every expert in training, without padding, each forward once."""

    test_the_trace_is_what_dispatch_received = Row(
        "LOAD-30",
        _METER,
        around.judge_trace,
        when=shows("recomputation", "schedules", "dropped pairs", "steps of one entry"),
    )
    """A trace has one record for every forward, of the experts that dispatch received."""
