"""FAST: equal splits, counters of shortcuts, optional libraries, and exchanges of a round robin."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.judge.claims import judge_optional_named, require_round_robin_offered
from moe_conformance.chapters.fast_paths.judge.equal_splits import (
    judge_compacted,
    judge_equal_splits,
    judge_gradients,
    judge_padded,
    judge_sizes,
)
from moe_conformance.chapters.fast_paths.judge.shortcut_counters import judge_counts, judge_unchanged
from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import RESULTS, judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_rows_gradients
from moe_conformance.judging.shared.experts.experts import EXPERT_RESULTS
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ON_COUNTED_EXPERTS, ExchangeStep, ExpertsStep, Script
from moe_conformance.workloads.records.workload import Workload


def uncut(workload: Workload) -> bool:
    """Select layouts without etp, over which rows may be gathered by an all-to-all of another size."""
    return workload.layout.etp == 1


class TestPieces:
    test_rows_are_first_and_zeros_behind = Row("FAST-01", Script("equal_splits"), judge_padded)
    """A padded piece has its rows in their order, then zeros."""

    test_what_is_cut_back_has_the_same_bits = Row("FAST-02", Script("equal_splits"), judge_compacted)
    """Cutting back undoes padding, whatever stands in the padding."""

    test_padding_has_no_part_in_gradients = Row("FAST-03", Script("equal_splits"), judge_gradients)
    """Rows have the upstream gradient of their own place; NaN in that of padding reaches nothing."""

    test_ranks_agree_on_a_size = Row("FAST-04", Script("equal_splits"), judge_sizes)
    """All ranks of ep pad to one size, which holds the largest piece of any of them."""

    test_arguments_are_left_alone = Row("EXCH-08", Script("equal_splits"), judge_arguments)
    """Rows and upstream gradients hold the bytes that were given."""


class TestExchange:
    test_splits_are_equal = Row("FAST-04", ExchangeStep(option="equal splits"), judge_equal_splits, when=uncut)
    """Every all-to-all of rows has one size of splits, forward and backward."""

    test_results_are_those_of_uneven_splits = Row(
        "FAST-05", ExchangeStep(option="equal splits"), (judge_deliveries, *RESULTS)
    )
    """Deliveries, outputs and gradients are those without padding; experts answer padding with large numbers."""


class TestCounters:
    test_every_decision_is_counted_once = Row("FAST-16", ON_COUNTED_EXPERTS, judge_counts)
    """Counters are off at first; on, a call is one decision and one look-up: a miss behind a change, else a hit."""

    test_counting_changes_nothing = Row("FAST-16", ON_COUNTED_EXPERTS, judge_unchanged)
    """Outputs and gradients have the same bits with counters on as with counters off."""


class TestOptional:
    test_results_are_the_same_without_what_is_optional = Row(
        "FAST-15", ExpertsStep(option="optional"), (*EXPERT_RESULTS, judge_optional_named)
    )
    """With what is optional and without it, outputs and gradients are right, and what is used is named."""


class TestRoundRobin:
    test_results_are_those_of_the_ids = Row(
        "FAST-14",
        ExchangeStep(option="round robin"),
        (require_round_robin_offered, judge_deliveries, judge_outputs, judge_rows_gradients, judge_dx, judge_dweights),
    )
    """Deliveries, outputs and gradients are those of the ids, whether every token goes to one rank or not."""
