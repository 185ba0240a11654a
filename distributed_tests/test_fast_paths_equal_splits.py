"""FAST: pieces padded to equal splits, and the exchange over them."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.judge.equal_split_exchanges import judge_equal_splits
from moe_conformance.chapters.fast_paths.judge.equal_splits import (
    judge_compacted,
    judge_gradients,
    judge_padded,
    judge_sizes,
)
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ExchangeStep, Script
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

    @requirement("FAST-05", run=ExchangeStep(option="equal splits"))
    def test_results_are_those_of_uneven_splits(self, reading: Reading, tally: Tally) -> None:
        """Deliveries, outputs and gradients are those without padding; experts answer padding with large numbers."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)
