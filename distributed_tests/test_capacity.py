"""DROP: how many slots an expert takes of a rank, which of them, and what becomes of the others."""

from __future__ import annotations

from moe_conformance.judging.capacity import (
    judge_capacity,
    judge_drop_gradients,
    judge_drop_weights,
    judge_fit,
    judge_lossless,
    judge_minimum,
    judge_own_tokens,
    judge_policy,
)
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.capacity import fits_all, others_change


class TestRoom:
    @requirement("DROP-01", kind="capacity", when=lambda workload: not workload.config.min_capacity)
    def test_the_capacity_is_the_mean_load_times_the_factor(self, reading: Reading, tally: Tally) -> None:
        """Of every expert a rank keeps as many slots as its capacity has room for."""
        judge_capacity(reading, tally)

    @requirement("DROP-02", kind="capacity", when=lambda workload: workload.config.min_capacity > 0)
    def test_the_minimum_is_the_least_capacity(self, reading: Reading, tally: Tally) -> None:
        """Where the formula gives less, the configured minimum is the capacity."""
        judge_minimum(reading, tally)

    @requirement("DROP-03", kind="capacity")
    def test_experts_keep_as_many_as_fit(self, reading: Reading, tally: Tally) -> None:
        """Whatever the policy, an expert is full before a slot that chose it is dropped."""
        judge_fit(reading, tally)

    @requirement("DROP-04", kind="capacity", when=fits_all)
    def test_room_for_all_changes_nothing(self, reading: Reading, tally: Tally) -> None:
        """A capacity of at least the largest load gives the ids and weights of no capacity."""
        judge_lossless(reading, tally)


class TestChoice:
    @requirement("DROP-05", kind="capacity", when=lambda workload: workload.config.drop_policy == "weights")
    def test_the_heaviest_stay(self, reading: Reading, tally: Tally) -> None:
        """By weight, no dropped slot weighs more than a kept one of the same expert."""
        judge_policy(reading, tally)

    @requirement("DROP-06", kind="capacity", when=lambda workload: workload.config.drop_policy == "position")
    def test_the_first_stay(self, reading: Reading, tally: Tally) -> None:
        """By position, no dropped slot comes before a kept one of the same expert."""
        judge_policy(reading, tally)

    @requirement("DROP-07", kind="capacity", when=others_change)
    def test_a_rank_drops_by_its_own_tokens(self, reading: Reading, tally: Tally) -> None:
        """What a rank drops is the same whatever the tokens of the other ranks are."""
        judge_own_tokens(reading, tally)


class TestConsequences:
    @requirement("DROP-09", kind="capacity")
    def test_kept_slots_keep_their_weights(self, reading: Reading, tally: Tally) -> None:
        """The weights of kept slots are those before the drop."""
        judge_drop_weights(reading, tally)

    @requirement("DROP-11", kind="capacity")
    def test_kept_slots_alone_give_gradients(self, reading: Reading, tally: Tally) -> None:
        """A dropped slot gives its token and the router nothing but what went through the sum of weights."""
        judge_drop_gradients(reading, tally)
