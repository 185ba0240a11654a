"""EXCH: laws of every exchange, seen in two runs that must give the same though they are fed or run otherwise."""

from __future__ import annotations

from moe_conformance.judging.equivalence.runs import RunTwins, judge_across, judge_alike, judge_scaled, judge_strided
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.corpus import determinism
from moe_conformance.workloads.corpus.equivalence import laws
from moe_conformance.workloads.records.features import all_alike, likened, likened_once
from moe_conformance.workloads.records.workload import Workload


def in_one_stage(workload: Workload) -> bool:
    """Whether twins are held against it, and every rank has the same experts' parameters within reach."""
    return likened(workload) and workload.layout.pp == 1


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


class TestPlaces:
    @requirement("EXCH-15", kind="probe", when=in_one_stage)
    def test_where_tokens_lie_means_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """The same tokens on other ranks, on fewer and in other layouts have the results that they had."""
        judge_alike(reading, twins(laws.spread(reading.outcome.workload)), tally)

    @requirement("EXCH-15", kind="experts", when=in_one_stage)
    def test_where_tokens_lie_means_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """The backend's own experts get the gradients that they got, whoever holds them."""
        judge_alike(reading, twins(laws.spread(reading.outcome.workload)), tally)

    @requirement("EXCH-43", kind="probe", when=likened)
    def test_exchanges_agree(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """All exchanges of a backend give the same for the same batch."""
        judge_across(reading, twins(laws.exchanged(reading.outcome.workload, twins.variants)), tally)

    @requirement("EXCH-43", kind="experts", when=likened)
    def test_exchanges_agree_behind_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Behind the backend's own experts too."""
        judge_across(reading, twins(laws.exchanged(reading.outcome.workload, twins.variants)), tally)

    @requirement("PACK-09", kind="probe", when=likened)
    def test_packs_mean_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Sequences in another order and in several microbatches give every token what they gave."""
        judge_alike(reading, twins(laws.packed(reading.outcome.workload)), tally)

    @requirement("PACK-09", kind="experts", when=likened)
    def test_packs_mean_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """The backend's own experts get the gradients of all packs together."""
        judge_alike(reading, twins(laws.packed(reading.outcome.workload)), tally)


class TestHistory:
    @requirement("EXCH-40", kind="probe", when=likened)
    def test_exchanges_take_turns(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """An exchange used in turn with others of other sizes gives the bytes that it gives alone."""
        judge_alike(reading, twins(determinism.in_turn(reading.outcome.workload)), tally)

    @requirement("EXCH-40", kind="experts", when=likened)
    def test_experts_take_turns(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Steps in turn with those of others give what they give alone, gradients of parameters too."""
        judge_alike(reading, twins(determinism.in_turn(reading.outcome.workload)), tally)


class TestInference:
    @requirement("EXCH-38", kind="experts", when=likened_once)
    def test_training_behind_inference(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """What the first forward of a process makes, in inference mode, is of use to training."""
        judge_alike(reading, twins(determinism.behind_inference(reading.outcome.workload)), tally)


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
