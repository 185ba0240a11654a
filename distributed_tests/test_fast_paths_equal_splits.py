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
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep, Script
from moe_conformance.workloads.records.workload import Workload


def uncut(workload: Workload) -> bool:
    """Select layouts without etp, over which rows may be gathered by an all-to-all of another size."""
    return workload.layout.etp == 1


class TestPieces:
    @requirement("FAST-01", run=Script("equal_splits"))
    def test_rows_are_first_and_zeros_behind(self, outcome: Outcome, tally: Tally) -> None:
        """A padded piece has its rows in their order, then zeros."""
        judge_padded(outcome, tally)

    @requirement("FAST-02", run=Script("equal_splits"))
    def test_what_is_cut_back_has_the_same_bits(self, outcome: Outcome, tally: Tally) -> None:
        """Cutting back undoes padding, whatever stands in the padding."""
        judge_compacted(outcome, tally)

    @requirement("FAST-03", run=Script("equal_splits"))
    def test_padding_has_no_part_in_gradients(self, outcome: Outcome, tally: Tally) -> None:
        """Rows have the upstream gradient of their own place; NaN in that of padding reaches nothing."""
        judge_gradients(outcome, tally)

    @requirement("FAST-04", run=Script("equal_splits"))
    def test_ranks_agree_on_a_size(self, outcome: Outcome, tally: Tally) -> None:
        """All ranks of ep pad to one size, which holds the largest piece of any of them."""
        judge_sizes(outcome, tally)

    @requirement("EXCH-08", run=Script("equal_splits"))
    def test_arguments_are_left_alone(self, outcome: Outcome, tally: Tally) -> None:
        """Rows and upstream gradients hold the bytes that were given."""
        judge_arguments(outcome, tally)


class TestExchange:
    @requirement("FAST-04", run=ExchangeStep(option="equal splits"), when=uncut)
    def test_splits_are_equal(self, reading: Reading, tally: Tally) -> None:
        """Every all-to-all of rows has one size of splits, forward and backward."""
        judge_equal_splits(reading, tally)

    @requirement("FAST-05", run=ExchangeStep(option="equal splits"))
    def test_results_are_those_of_uneven_splits(self, reading: Reading, tally: Tally) -> None:
        """Deliveries, outputs and gradients are those without padding; experts answer padding with large numbers."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)
