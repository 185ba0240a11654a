"""EXCH: laws of every exchange, seen in two runs that must give the same though they are fed or run otherwise."""

from __future__ import annotations

from moe_conformance.judging.reading import Reading
from moe_conformance.judging.twins import RunTwins, judge_alike, judge_scaled, judge_strided
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads import twins as laws
from moe_conformance.workloads.features import all_alike
from moe_conformance.workloads.records import Workload


def likened(workload: Workload) -> bool:
    """Whether twins are held against runs of it."""
    return bool(workload.likened)


class TestNames:
    @requirement("EXCH-13", kind="probe", when=likened)
    def test_the_order_of_tokens_and_slots_means_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Tokens and slots in another order have the results that they had."""
        judge_alike(reading, twins(laws.reordered(reading.outcome.workload)), tally)

    @requirement("EXCH-13", kind="experts", when=likened)
    def test_the_order_means_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Behind the backend's own experts too, and parameters get the gradients that they got."""
        judge_alike(reading, twins(laws.reordered(reading.outcome.workload)), tally)

    @requirement("EXCH-14", kind="probe", when=likened)
    def test_the_numbers_of_experts_mean_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Experts under other numbers, and so on other ranks, give tokens the results that they had."""
        judge_alike(reading, twins(laws.relabelled(reading.outcome.workload)), tally)

    @requirement("EXCH-14", kind="experts", when=likened)
    def test_the_numbers_mean_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """The backend's own experts take their parameters along, and their gradients."""
        judge_alike(reading, twins(laws.relabelled(reading.outcome.workload)), tally)


class TestWeights:
    @requirement("EXCH-16", kind="probe", when=likened)
    def test_powers_of_two_pass_through(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Weights times a power of two give outputs and input gradients times that power, to the bit."""
        judge_scaled(reading, twins(laws.scaled(reading.outcome.workload)), tally)

    @requirement("EXCH-16", kind="experts", when=likened)
    def test_powers_of_two_pass_through_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Behind the backend's own experts too: a power of two changes exponents only."""
        judge_scaled(reading, twins(laws.scaled(reading.outcome.workload)), tally)


class TestMemory:
    @requirement("EXCH-17", kind="probe", when=likened)
    def test_strides_mean_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Inputs with gaps between their elements give the bytes that they give without, or are refused at once."""
        judge_strided(reading, twins(laws.strided(reading.outcome.workload)), tally)

    @requirement("EXCH-17", kind="experts", when=likened)
    def test_strides_mean_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Behind the backend's own experts too."""
        judge_strided(reading, twins(laws.strided(reading.outcome.workload)), tally)

    @requirement("EXCH-17", kind="probe", when=all_alike)
    def test_what_is_there_once_counts_for_all(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Ids, weights and upstream that are one row in memory, or one number, count for every token."""
        judge_strided(reading, twins(laws.expanded(reading.outcome.workload)), tally)
