"""EXCH: metamorphic checks: two runs with permuted, split or rescaled inputs must give the same."""

from __future__ import annotations

import torch

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.refusals import judge_strided
from moe_conformance.judging.shared.equivalence.runs import RunTwins, judge_across, judge_alike, judge_scaled
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads import laws
from moe_conformance.workloads.records.features import all_alike, likened, likened_once
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload


def in_one_stage(workload: Workload) -> bool:
    """Whether twins are compared with it, and every rank holds the parameters of the same experts."""
    return likened(workload) and workload.layout.pp == 1


def cast_to(workload: Workload) -> bool:
    """Whether a run under autocast is compared with it: its tokens have a dtype that autocast casts to."""
    return likened_once(workload) and workload.config.dtype in (torch.bfloat16, torch.float16)


class TestNames:
    @requirement("EXCH-13", run=ExchangeStep(), when=likened)
    def test_the_order_of_tokens_and_slots_means_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Permuted tokens and slots have the same outputs and gradients."""
        judge_alike(reading, twins(laws.reordered(reading.outcome.workload)), tally)

    @requirement("EXCH-13", run=ExpertsStep(), when=likened)
    def test_the_order_means_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too; parameters have the same gradients."""
        judge_alike(reading, twins(laws.reordered(reading.outcome.workload)), tally)

    @requirement("EXCH-14", run=ExchangeStep(), when=likened)
    def test_the_numbers_of_experts_mean_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Permuted expert ids, and so experts on other ranks, give the same outputs and gradients."""
        judge_alike(reading, twins(laws.relabelled(reading.outcome.workload)), tally)

    @requirement("EXCH-14", run=ExpertsStep(), when=likened)
    def test_the_numbers_mean_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too; parameters and their gradients are permuted alike."""
        judge_alike(reading, twins(laws.relabelled(reading.outcome.workload)), tally)


class TestPlaces:
    @requirement("EXCH-15", run=ExchangeStep(), when=in_one_stage)
    def test_where_tokens_lie_means_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """The same tokens on other ranks, on fewer ranks and in other layouts have the same outputs and gradients."""
        judge_alike(reading, twins(laws.spread(reading.outcome.workload)), tally)

    @requirement("EXCH-15", run=ExpertsStep(), when=in_one_stage)
    def test_where_tokens_lie_means_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too; their gradients are the same on whichever rank they are."""
        judge_alike(reading, twins(laws.spread(reading.outcome.workload)), tally)

    @requirement("EXCH-43", run=ExchangeStep(), when=likened)
    def test_exchanges_agree(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """All variants of a backend give the same outputs and gradients for the same batch."""
        judge_across(reading, twins(laws.exchanged(reading.outcome.workload, twins.variants)), tally)

    @requirement("EXCH-43", run=ExpertsStep(), when=likened)
    def test_exchanges_agree_behind_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too."""
        judge_across(reading, twins(laws.exchanged(reading.outcome.workload, twins.variants)), tally)

    @requirement("PACK-09", run=ExchangeStep(), when=likened)
    def test_packs_mean_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Packed sequences in another order and in several microbatches give tokens the same output and gradient."""
        judge_alike(reading, twins(laws.packed(reading.outcome.workload)), tally)

    @requirement("PACK-09", run=ExpertsStep(), when=likened)
    def test_packs_mean_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too; their gradients are the sum over all packs."""
        judge_alike(reading, twins(laws.packed(reading.outcome.workload)), tally)


class TestHistory:
    @requirement("EXCH-40", run=ExchangeStep(), when=likened)
    def test_exchanges_take_turns(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """An exchange used in turn with others of other sizes gives the bytes that it gives alone."""
        judge_alike(reading, twins(determinism.in_turn(reading.outcome.workload)), tally)

    @requirement("EXCH-40", run=ExpertsStep(), when=likened)
    def test_experts_take_turns(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Steps in turn with those of others give what they give alone, gradients of parameters too."""
        judge_alike(reading, twins(determinism.in_turn(reading.outcome.workload)), tally)


class TestInference:
    @requirement("EXCH-38", run=ExpertsStep(), when=likened_once)
    def test_training_behind_inference(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """What the first forward of a process caches, in inference mode, can be used in training."""
        judge_alike(reading, twins(determinism.behind_inference(reading.outcome.workload)), tally)


class TestAutograd:
    @requirement("EXCH-46", run=ExpertsStep(), when=cast_to)
    def test_autocast_changes_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Under autocast to the tokens' dtype exchange and experts give the same values in the same dtypes."""
        judge_alike(reading, twins(laws.under_autocast(reading.outcome.workload)), tally)


class TestWeights:
    @requirement("EXCH-16", run=ExchangeStep(), when=likened)
    def test_powers_of_two_pass_through(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Weights times a power of two give outputs and input gradients times that power, to the bit."""
        judge_scaled(reading, twins(laws.scaled(reading.outcome.workload)), tally)

    @requirement("EXCH-16", run=ExpertsStep(), when=likened)
    def test_powers_of_two_pass_through_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too: a power of two changes exponents only."""
        judge_scaled(reading, twins(laws.scaled(reading.outcome.workload)), tally)


class TestMemory:
    @requirement("EXCH-17", run=ExchangeStep(), when=likened)
    def test_strides_mean_nothing(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Strided inputs give the same bytes as contiguous ones, or are refused."""
        judge_strided(reading, twins(laws.strided(reading.outcome.workload)), tally)

    @requirement("EXCH-17", run=ExpertsStep(), when=likened)
    def test_strides_mean_nothing_to_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """With the backend's experts too."""
        judge_strided(reading, twins(laws.strided(reading.outcome.workload)), tally)

    @requirement("EXCH-17", run=ExchangeStep(), when=all_alike)
    def test_what_is_there_once_counts_for_all(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """Expanded ids, weights and upstream gradients (one row in memory, stride 0) are used for every token."""
        judge_strided(reading, twins(laws.expanded(reading.outcome.workload)), tally)
