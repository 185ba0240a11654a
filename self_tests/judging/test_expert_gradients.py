"""Finished gradients of experts: what is wrong is told in words; and windows, which must be complete."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_dx,
    judge_expert_gradients,
    judge_expert_outputs,
    judge_idle_expert_gradients,
    judge_replicas,
    judge_windows,
)
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
)
from moe_conformance.workloads.records.workload import ParameterKey
from self_tests.judging.breaking import caught, judged
from self_tests.judging.breaking_experts import (
    REPLICATED,
    clean,
    edit_batches,
    edit_final,
    never,
    present,
    swap_gate_and_up,
    without,
)
from self_tests.judging.simulated_experts import own_workload, simulate_experts


class TestWrongParameterGradients:
    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (2, "2.000 x the expected value: ep or edp"),
            (0.25, "0.250 x the expected value: 1/dp"),
            (0, "zero"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_a_factor_of_all(self, factor: float, words: str, dtype: torch.dtype) -> None:
        """One factor of every gradient is told once, with every size that it equals, and blamed on finishing."""
        outcome = edit_final(clean(REPLICATED, dtype=dtype), lambda rank, key, value: factor * value)
        wrong = caught(judge_expert_gradients, outcome)
        assert isinstance(wrong, WrongGradient)
        assert f"every expert gradient is {words}" == wrong.sentence
        assert ("finish", (0, 1, 2, 3), factor) == (wrong.stage, wrong.ranks, wrong.ratio)

    @pytest.mark.parametrize(
        ("chosen", "words", "ranks"),
        [
            (lambda rank, key: key[1] == 3, "every gradient of expert 3 is 2.000 x the expected value: ep", (0, 2)),
            (lambda rank, key: rank == 1, "every expert gradient on rank 1 is 2.000 x the expected value: ep", (1,)),
            (
                lambda rank, key: key[0] == "down",
                "every gradient of down is 2.000 x the expected value: ep",
                (0, 1, 2, 3),
            ),
        ],
    )
    def test_a_factor_of_some(
        self, chosen: Callable[[int, ParameterKey], bool], words: str, ranks: tuple[int, ...]
    ) -> None:
        """A factor of one expert, of one rank or of one projection is told as that."""
        change = lambda rank, key, value: 2 * value if chosen(rank, key) else value  # noqa: E731
        wrong = caught(judge_expert_gradients, edit_final(clean(REPLICATED), change))
        assert words in wrong.sentence
        assert ranks == wrong.ranks

    def test_tokens_of_the_own_rank_only(self) -> None:
        """Replicas that are not reduced hold what their own exchange group sent; the local sums prove it."""
        outcome = clean(REPLICATED)
        unreduced = replace(outcome, ranks=tuple(replace(rank, grads_final=rank.grads_local) for rank in outcome.ranks))
        wrong = caught(judge_expert_gradients, unreduced)
        assert "only the tokens of its own ep_etp or ep group are in it" in wrong.sentence
        assert "finish" == wrong.stage
        assert "ranks 0 and 2 hold replicas of gate of expert 0" in caught(judge_replicas, unreduced).sentence

    def test_a_missing_rank(self) -> None:
        """Gradients without one rank's tokens name that rank, and the backward before finishing."""
        work = own_workload(Layout(4, ep=4))
        silent = replace(work.batches[0][2], upstream=0 * work.batches[0][2].upstream)
        without = simulate_experts(replace(work, batches=((*work.batches[0][:2], silent, work.batches[0][3]),)))
        wrong = caught(judge_expert_gradients, replace(without, workload=work))
        assert "the tokens of rank 2 are missing in it" in wrong.sentence
        assert "gradient" == wrong.stage

    def test_a_missing_microbatch(self) -> None:
        """Accumulation that keeps the last microbatch alone is recognised."""
        work = own_workload(microbatches=2)
        first = tuple(replace(batch, upstream=0 * batch.upstream) for batch in work.batches[0])
        last = simulate_experts(replace(work, batches=(first, work.batches[1])))
        assert "only microbatch 1 is in it" in caught(judge_expert_gradients, replace(last, workload=work)).sentence

    @pytest.mark.parametrize(
        ("role", "words"),
        [
            (lambda key: (key[0], key[1] ^ 1), "likely cause: it is the gradient of expert 1"),
            (lambda key: swap_gate_and_up(key), "likely cause: it is the gradient of up"),
        ],
    )
    def test_gradients_in_each_others_place(self, role: Callable[[ParameterKey], ParameterKey], words: str) -> None:
        """A gradient that belongs to another expert, or to another projection, is recognised."""
        outcome = clean()
        finals = [rank.grads_final or {} for rank in outcome.ranks]
        change = lambda rank, key, value: finals[rank][role(key)].value  # noqa: E731
        wrong = caught(judge_expert_gradients, edit_final(outcome, change))
        assert wrong.sentence.startswith("the gradient of gate of expert 0 on rank 0 is ")
        assert words in wrong.sentence

    def test_experts_added_to_each_other(self) -> None:
        """Gradients reduced over ranks that hold different experts are recognised."""
        outcome = clean()
        finals = [rank.grads_final or {} for rank in outcome.ranks]

        def change(rank: int, key: ParameterKey, value: Tensor) -> Tensor:
            assert key[1] is not None
            return value + present(finals[1 - rank][key[0], (key[1] + 4) % 8].value)

        wrong = caught(judge_expert_gradients, edit_final(outcome, change))
        assert "it is the sum over experts [0, 4], which have the same local index on their ranks" in wrong.sentence

    def test_parts_in_each_others_place(self) -> None:
        """The gradient of another shard is recognised."""
        outcome = clean(Layout(2, etp=2))
        finals = [rank.grads_final or {} for rank in outcome.ranks]
        wrong = caught(
            judge_expert_gradients, edit_final(outcome, lambda rank, key, value: finals[1 - rank][key].value)
        )
        assert wrong.sentence.startswith("the gradient of gate of expert 0 (part 0 of 2) on rank 0 is ")
        assert "likely cause: it is the gradient of part 1" in wrong.sentence

    def test_parts_added_to_each_other(self) -> None:
        """Gradients reduced over ranks that hold other shards are recognised."""
        outcome = clean(Layout(2, etp=2))
        finals = [rank.grads_final or {} for rank in outcome.ranks]
        change = lambda rank, key, value: value + present(finals[1 - rank][key].value)  # noqa: E731
        wrong = caught(judge_expert_gradients, edit_final(outcome, change))
        assert wrong.sentence.startswith("the gradient of gate of expert 0 (part 0 of 2) on rank 0 is ")
        assert "likely cause: it is the sum over all 2 parts: it was reduced over ranks" in wrong.sentence

    def test_hundreds_of_wrong_gradients_are_not_all_explained(self) -> None:
        """The mistake behind a wrong tensor takes time to find: it is looked for in the first 24 alone."""
        noise = torch.Generator().manual_seed(1)
        change = lambda rank, key, value: value + torch.randn(value.shape, generator=noise)  # noqa: E731
        wrong = caught(judge_expert_gradients, edit_final(clean(REPLICATED), change))
        assert "22 more of the same kind. Also: the gradient of" in wrong.sentence
        assert re.search(r"on rank 2 is \S+ instead of .*; 22 more of the same kind$", wrong.sentence)
        assert {"outside": 24, "not explained": 24} == Counter(finding.kind for finding in wrong.findings)

    def test_absent(self) -> None:
        """None after finishing is a fault of its own kind."""
        outcome = edit_final(clean(), lambda rank, key, value: None if key == ("up", 5) else value)
        wrong = caught(judge_expert_gradients, outcome)
        assert isinstance(wrong, AbsentGradient)
        assert "up of expert 5 on rank 1 has no gradient (None)" in wrong.sentence
        assert ("finish", (1,)) == (wrong.stage, wrong.ranks)

    def test_shape(self) -> None:
        """A gradient of another shape is not broadcast."""
        outcome = edit_final(clean(), lambda rank, key, value: value.T.contiguous() if key == ("up", 5) else value)
        wrong = caught(judge_expert_gradients, outcome)
        assert isinstance(wrong, WrongForm)
        assert "up of expert 5 on rank 1 has the shape (32, 16) instead of (16, 32)" in wrong.sentence

    def test_not_offered(self) -> None:
        """Where no gradients are finished nothing is judged, for the backend's own reason."""
        outcome = clean()
        silent = tuple(replace(rank, grads_final=None, finish_refusal="no trainer") for rank in outcome.ranks)
        for judge in (judge_expert_gradients, judge_idle_expert_gradients, judge_replicas):
            with pytest.raises(NotOffered, match="no trainer"):
                judge(read(replace(outcome, ranks=silent)), Tally())

    @pytest.mark.parametrize("judge", [judge_expert_gradients, judge_idle_expert_gradients, judge_replicas])
    def test_one_rank_that_finishes_nothing_is_told(self, judge: Callable[..., None]) -> None:
        """What one rank finishes all must."""
        outcome = clean(REPLICATED)
        ranks = (outcome.ranks[0], replace(outcome.ranks[1], grads_final=None), *outcome.ranks[2:])
        wrong = caught(judge, replace(outcome, ranks=ranks))
        assert isinstance(wrong, AbsentGradient)
        assert "rank 1 finished no gradients, while rank 0 did" in wrong.sentence
        assert ("finish", (1,)) == (wrong.stage, wrong.ranks)

    def test_microbatches_that_only_go_forward_are_in_no_gradient(self) -> None:
        """A gradient is over what went backward; an expert that only others reach is idle; y is judged all the same."""
        work = own_workload(microbatches=2)
        work = replace(work, batches=(work.batches[0], tuple(map(never(3), work.batches[1]))), schedule="F0 F1 B1")
        silent = tuple(replace(batch, upstream=0 * batch.upstream) for batch in work.batches[0])
        right = replace(simulate_experts(replace(work, batches=(silent, work.batches[1]))), workload=work)
        for judge in (judge_expert_gradients, judge_idle_expert_gradients):
            assert not judged(judge, right).vacuous
        judges = (judge_expert_outputs, judge_expert_dx)
        assert [44 * 32, 21 * 32] == [judged(judge, right).elements for judge in judges]
        leaked = simulate_experts(work)
        assert "microbatches without a backward are in it too" in caught(judge_expert_gradients, leaked).sentence
        assert "expert 3" in caught(judge_idle_expert_gradients, leaked).sentence

    def test_one_bit_between_replicas(self) -> None:
        """Replicas that differ by one rounding pass their bounds and are not equal."""
        nudge = lambda rank, key, value: value * (1 + 2**-23) if rank == 2 else value  # noqa: E731
        outcome = edit_final(clean(REPLICATED), nudge)
        assert not judged(judge_expert_gradients, outcome).vacuous
        assert (0, 2) == caught(judge_replicas, outcome).ranks


class TestIdleExperts:
    @pytest.mark.parametrize(
        ("leftover", "error", "words"),
        [
            (None, AbsentGradient, "gate of expert 3 on rank 0 received no token and has the gradient None"),
            (1e-30, WrongGradient, "gate of expert 3 on rank 0 received no token and has the gradient 1e-30"),
        ],
    )
    def test_must_hold_zeros(self, leftover: float | None, error: type[Exception], words: str) -> None:
        """Neither None nor the smallest leftover passes for zeros."""

        def change(rank: int, key: ParameterKey, value: Tensor) -> Tensor | None:
            return value if key[1] != 3 else None if leftover is None else value + leftover

        outcome = edit_final(simulate_experts(edit_batches(own_workload(), never(3))), change)
        wrong = caught(judge_idle_expert_gradients, outcome)
        assert error is type(wrong)
        assert words in wrong.sentence
        assert not judged(judge_expert_gradients, outcome).vacuous

    def test_idle_means_on_all_ranks(self) -> None:
        """An expert that only one rank's tokens reach is not idle on any rank."""
        work = own_workload(REPLICATED)
        batches = ((work.batches[0][0], *map(never(3), work.batches[0][1:])),)
        assert judged(judge_idle_expert_gradients, simulate_experts(replace(work, batches=batches))).vacuous


class TestWindows:
    def test_complaints_are_passed_on(self) -> None:
        """What the ranks found wrong with windows is told with the rank."""
        outcome = clean()
        complaint = replace(outcome.ranks[1], uncovered=("the window on up of expert 5 is a copy, not a view",))
        wrong = caught(judge_windows, replace(outcome, ranks=(outcome.ranks[0], complaint)))
        assert isinstance(wrong, Uncovered)
        assert "rank 1: the window on up of expert 5 is a copy, not a view" in wrong.sentence
        assert (1,) == wrong.ranks

    @pytest.mark.parametrize("judge", [judge_windows, judge_expert_gradients, judge_idle_expert_gradients])
    def test_nothing_may_be_left_out(self, judge: Callable[..., None]) -> None:
        """A parameter that no rank of a stage names is missed, though all that is named is right."""
        outcome = clean(REPLICATED)
        wrong = caught(judge, without(outcome, ("down", 6), (1, 3)))
        assert isinstance(wrong, Uncovered)
        assert "down of expert 6 is yielded by 'named' on no rank" in wrong.sentence
        wrong = caught(judge_windows, without(outcome, ("down", 6), (1,)))
        assert "down of expert 6 is yielded by 'named' on 1 of the 2 ranks that hold a shard of it" in wrong.sentence

    def test_names_must_last(self) -> None:
        """A parameter that one of its holders names before finishing and not afterwards is missed."""
        outcome = clean(REPLICATED)
        kept = without(outcome, ("down", 6), (3,)).ranks[3]
        lost = replace(outcome, ranks=(*outcome.ranks[:3], replace(kept, grads_local=outcome.ranks[3].grads_local)))
        wrong = caught(judge_expert_gradients, lost)
        assert "finish" == wrong.stage
        assert "down of expert 6 is yielded by 'named' on 1 of the 2 ranks that hold a shard of it" in wrong.sentence

    def test_sharding_over_replicas_is_legal(self) -> None:
        """A backend may leave each finished gradient on one of its replicas, if it does so with all of them."""
        outcome = clean(REPLICATED)
        ranks = list(outcome.ranks)
        for rank, parity in ((0, 0), (1, 0), (2, 1), (3, 1)):
            final = ranks[rank].grads_final
            assert final is not None
            half = {key: grad for key, grad in final.items() if key[1] is not None and key[1] % 2 == parity}
            ranks[rank] = replace(ranks[rank], grads_final=half)
        sharded = replace(outcome, ranks=tuple(ranks))
        assert not judged(judge_expert_gradients, sharded).vacuous
        with pytest.raises(NotOffered, match="no replicas"):
            judged(judge_replicas, sharded)

    def test_all_parts_are_needed(self) -> None:
        """One part of two is not the whole."""
        wrong = caught(judge_windows, without(clean(Layout(2, etp=2)), ("down", 6), (1,)))
        assert "down of expert 6 is yielded by 'named' in the shards [(1, 0, 2)] only" in wrong.sentence
