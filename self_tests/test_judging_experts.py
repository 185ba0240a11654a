"""Runs with the backend's own experts: what is right passes and is counted, what is wrong is told in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_conformance.judging.own_experts import (
    judge_expert_gradients,
    judge_idle_expert_gradients,
    judge_own_dweights,
    judge_own_dx,
    judge_own_outputs,
    judge_replicas,
    judge_weight_place,
    judge_windows,
)
from moe_conformance.judging.reading import read
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome, RankOutcome
from moe_conformance.topology import Layout
from moe_conformance.workloads.records import Batch, ParameterKey, Workload
from self_tests.breaking import caught, edit, judged
from self_tests.simulated_experts import Arithmetic, own_workload, simulate_experts

OF_TOKENS = (judge_own_outputs, judge_own_dx, judge_own_dweights)
OF_PARAMETERS = (judge_expert_gradients, judge_windows)
LAYOUTS = [Layout(1), Layout(2, ep=2), Layout(4, ep=2), Layout(4, ep=2, etp=2), Layout(4, pp=2, ep=2), Layout(4, etp=4)]
REPLICATED = Layout(4, ep=2)  # ranks 0 and 2 hold experts 0 to 3, ranks 1 and 3 the others

Finals = dict[ParameterKey, Grad]


def clean(layout: Layout | None = None, **fields: object) -> Outcome:
    """Run without a fault."""
    return simulate_experts(own_workload(layout, **fields))  # type: ignore[arg-type]


def edit_final(outcome: Outcome, change: Callable[[int, ParameterKey, Tensor], Tensor | None]) -> Outcome:
    """Change finished gradients, given (rank, key, gradient)."""

    def changed(rank: RankOutcome) -> RankOutcome:
        assert rank.grads_final is not None
        final = {}
        for key, grad in rank.grads_final.items():
            assert grad.value is not None
            final[key] = replace(grad, value=change(rank.rank, key, grad.value))
        return replace(rank, grads_final=final)

    return replace(outcome, ranks=tuple(map(changed, outcome.ranks)))


def with_parameters(outcome: Outcome, role: Callable[[ParameterKey], ParameterKey]) -> Outcome:
    """Pretend that the run was given other parameters than it was: judge it against another workload."""
    own = outcome.workload.parameters
    return replace(outcome, workload=replace(outcome.workload, parameters={key: own[role(key)] for key in own}))


def edit_batches(workload: Workload, change: Callable[[Batch], Batch]) -> Workload:
    """Change every batch."""
    return replace(workload, batches=tuple(tuple(map(change, ranks)) for ranks in workload.batches))


def never(expert: int) -> Callable[[Batch], Batch]:
    """Empty all slots of one expert."""
    return lambda batch: replace(batch, ids_TK=torch.where(batch.ids_TK == expert, -1, batch.ids_TK))


class TestRight:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_every_judge_passes_and_counts_every_rank(self, layout: Layout, dtype: torch.dtype) -> None:
        """On every layout, pipeline stages included, each judge compares on each rank and comes near some bound."""
        outcome = clean(layout, dtype=dtype, microbatches=2)
        for judge in (*OF_TOKENS, *OF_PARAMETERS):
            tally = judged(judge, outcome)
            assert set(range(layout.world)) == tally.ranks
            assert judge is judge_windows or 0 < tally.worst <= 1

    def test_elements_are_counted_once(self) -> None:
        """Of y and dx T D are counted, of weights T K, of parameters every element of every holder."""
        outcome = clean(REPLICATED, tokens=9)
        tokens = 9 + 8 + 7 + 6
        elements = [judged(judge, outcome).elements for judge in (*OF_TOKENS, *OF_PARAMETERS)]
        assert [tokens * 32, tokens * 32, tokens * 2, 2 * 8 * 3 * 512, 2 * 8 * 3 * 512] == elements

    @pytest.mark.parametrize("place", ["input", "output"])
    def test_the_place_of_weights_is_told_apart(self, place: str) -> None:
        """Where weights are applied is judged by elements in which the two places differ, nearly all."""
        outcome = simulate_experts(own_workload(), Arithmetic(place=place))  # type: ignore[arg-type]
        elements = judged(judge_own_outputs, outcome).elements
        assert 0.95 * elements < judged(judge_weight_place, outcome).elements <= elements

    def test_weights_of_one_show_no_place(self) -> None:
        """With weights of one nothing tells the places apart, and nothing is counted."""
        work = edit_batches(own_workload(), lambda b: replace(b, weights_TK=torch.ones_like(b.weights_TK)))
        assert judged(judge_weight_place, simulate_experts(work)).vacuous

    def test_averages_are_judged_as_averages(self) -> None:
        """A session that averages over dp * cp is held against the mean, and fails if it claims to sum."""
        outcome = simulate_experts(own_workload(REPLICATED), Arithmetic(convention="mean_over_dp"))
        assert not judged(judge_expert_gradients, outcome).vacuous
        lying = replace(outcome, ranks=tuple(replace(rank, loss_convention="sum") for rank in outcome.ranks))
        assert (
            "every expert gradient is 0.250 x the oracle: 1/world or 1/dp"
            in caught(judge_expert_gradients, lying).sentence
        )

    def test_idle_experts_are_judged_by_themselves(self) -> None:
        """Zeros of an idle expert are counted by their own judge, and by that one alone."""
        outcome = simulate_experts(edit_batches(own_workload(), never(3)))
        assert 3 * 512 == judged(judge_idle_expert_gradients, outcome).elements
        everything = judged(judge_windows, outcome).elements
        assert everything - 3 * 512 == judged(judge_expert_gradients, outcome).elements

    def test_replicas_are_compared_with_the_first(self) -> None:
        """Two replicas of eight experts are one comparison each; without replicas there is none."""
        assert 8 * 3 * 512 == judged(judge_replicas, clean(REPLICATED)).elements
        assert judged(judge_replicas, clean()).vacuous

    def test_a_rank_without_tokens_has_no_gradients_to_show(self) -> None:
        """Where a rank has no tokens, None is as good as an empty gradient."""
        outcome = clean(tokens=1)
        silent = edit(outcome, 1, lambda seen: replace(seen, dx_TD=Grad(None), dweights_TK=Grad(None)))
        assert 32 == judged(judge_own_dx, silent).elements
        assert 2 == judged(judge_own_dweights, silent).elements

    def test_parameters_may_be_sharded_over_replicas(self) -> None:
        """Where every replica holds half of the experts (FSDP), the stage as a whole is complete, and is judged."""
        outcome = clean(REPLICATED)

        def half(rank: RankOutcome) -> RankOutcome:
            kept = {0: (0, 1), 2: (2, 3), 1: (4, 5), 3: (6, 7)}[rank.rank]
            assert rank.grads_final is not None
            final = {key: grad for key, grad in rank.grads_final.items() if key[1] in kept}
            return replace(rank, grads_final=final, grads_local={key: Grad(None) for key in final})

        sharded = replace(outcome, ranks=tuple(map(half, outcome.ranks)))
        assert 8 * 3 * 512 == judged(judge_expert_gradients, sharded).elements
        assert 8 * 3 * 512 == judged(judge_windows, sharded).elements
        doubled = edit_final(sharded, lambda rank, key, value: 2 * value)
        assert "finish" == caught(judge_expert_gradients, doubled).stage  # what was there before is out of sight


class TestWrongOutputs:
    def test_one_element_is_located(self) -> None:
        """One wrong element is told with rank, token, column, both values and the bound."""
        changed = torch.zeros(11, 32)
        changed[4, 7] = 0.25
        wrong = caught(judge_own_outputs, edit(clean(), 1, lambda seen: replace(seen, y=add(seen.y, changed))))
        assert isinstance(wrong, WrongOutput)
        assert "y of rank 1 token 4 is" in wrong.sentence
        assert "at [7]" in wrong.sentence
        assert ("experts", (1,)) == (wrong.stage, wrong.ranks)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda y: 2 * y, "every element of y on rank 0 is 2.000 x the oracle: world or dp or ep or K"),
            (lambda y: 0 * y, "every element of y on rank 0 is zero"),
            (lambda y: y / 0, "at [0] (not finite); 11 more of the same kind"),
            (lambda y: y * torch.arange(12)[:, None], "y of rank 0 token 2 is 2.000 x the oracle"),
        ],
    )
    def test_factors_of_a_rank_or_of_tokens(self, change: Callable[[Tensor], Tensor], words: str) -> None:
        """A factor that one rank has, or each of its tokens by itself, is told."""
        wrong = caught(judge_own_outputs, edit(clean(), 0, lambda seen: replace(seen, y=change(present(seen.y)))))
        assert (0,) == wrong.ranks
        assert words in wrong.sentence

    def test_a_factor_of_all_is_named(self) -> None:
        """A factor that all tokens have is told once, with every size that it equals."""
        outcome = clean(REPLICATED)
        for rank in range(4):
            outcome = edit(outcome, rank, lambda seen: replace(seen, y=4 * present(seen.y)))
        wrong = caught(judge_own_outputs, outcome)
        assert "every element of y is 4.000 x the oracle: world or dp" in wrong.sentence
        assert 4.0 == wrong.ratio

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_mistakes_are_guessed(self, dtype: torch.dtype) -> None:
        """What the run did instead is said: of y, of dx and of the weights' gradients alike."""
        work = own_workload(dtype=dtype)
        others = {
            "gate and up were swapped": with_parameters(simulate_experts(work), swap_gate_and_up),
            "expert e had the parameters of expert (e + 1) modulo 8": with_parameters(simulate_experts(work), previous),
            "slot k had the weight of slot (k + 1) modulo 2": replace(
                simulate_experts(edit_batches(work, lambda b: replace(b, weights_TK=b.weights_TK.roll(1, 1)))),
                workload=work,
            ),
            "all weights were 1": replace(
                simulate_experts(edit_batches(work, lambda b: replace(b, weights_TK=0 * b.weights_TK + 1))),
                workload=work,
            ),
        }
        for words, outcome in others.items():
            for judge in (judge_own_outputs, judge_own_dx):
                assert f"as if {words}" in caught(judge, outcome).sentence

    def test_the_other_place_of_weights_is_guessed(self) -> None:
        """Weights applied at the input by a session that says output are recognised in all that they change."""
        outcome = simulate_experts(own_workload(), Arithmetic(place="input"))
        lying = replace(outcome, ranks=tuple(replace(rank, weights_at="combine") for rank in outcome.ranks))
        for judge in (judge_own_outputs, judge_weight_place, judge_own_dx, judge_own_dweights, judge_expert_gradients):
            assert "as if the weights were applied at the experts' input" in caught(judge, lying).sentence

    def test_a_narrower_dtype_is_recognised(self) -> None:
        """A float32 layer that was computed in bfloat16 is told so, in outputs and in gradients."""
        narrow, wide = own_workload(dtype=torch.bfloat16), own_workload(dtype=torch.float32)
        parameters = {key: value.float() for key, value in narrow.parameters.items()}
        batches = edit_batches(narrow, lambda b: replace(b, x_TD=b.x_TD.float(), upstream=b.upstream.float())).batches
        outcome = replace(simulate_experts(narrow), workload=replace(wide, batches=batches, parameters=parameters))
        for judge in (*OF_TOKENS, judge_expert_gradients):
            assert (
                "computed with the precision of bfloat16 or float16 instead of float32"
                in caught(judge, outcome).sentence
            )

    def test_only_one_shards_part(self) -> None:
        """Combine that leaves the other etp shards' parts out is recognised."""
        work = own_workload(Layout(2, etp=2))
        first = {key: cut(key, value) for key, value in work.parameters.items()}
        outcome = replace(simulate_experts(replace(work, parameters=first)), workload=work)
        assert "as if only the part of etp shard 0 was in it" in caught(judge_own_outputs, outcome).sentence

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda seen: replace(seen, y=None), "y of rank 1 is None"),
            (lambda seen: replace(seen, y=seen.y[1:]), "y of rank 1 has the shape (10, 32) instead of (11, 32)"),
        ],
    )
    def test_form(self, change: Callable[[Microbatch], Microbatch], words: str) -> None:
        """A missing or misshapen output is a matter of form."""
        wrong = caught(judge_own_outputs, edit(clean(), 1, change))
        assert isinstance(wrong, WrongForm)
        assert words in wrong.sentence


class TestWrongTokenGradients:
    @pytest.mark.parametrize("judge", [judge_own_dx, judge_own_dweights])
    def test_absent(self, judge: Callable[..., None]) -> None:
        """None is not taken for zeros."""
        outcome = edit(clean(), 1, lambda seen: replace(seen, dx_TD=Grad(None), dweights_TK=Grad(None)))
        wrong = caught(judge, outcome)
        assert isinstance(wrong, AbsentGradient)
        assert ("gradient", (1,)) == (wrong.stage, wrong.ranks)

    def test_shifted_slots(self) -> None:
        """Gradients of weights that lie one slot off are recognised, though none is missing."""
        outcome = clean()
        for rank in range(2):
            outcome = edit(
                outcome, rank, lambda seen: replace(seen, dweights_TK=Grad(present(seen.dweights_TK.value).roll(1, 1)))
            )
        assert "slot k had the gradient of slot (k + 1) modulo 2" in caught(judge_own_dweights, outcome).sentence


class TestWrongParameterGradients:
    @pytest.mark.parametrize(
        ("factor", "words"),
        [(2, "2.000 x the oracle: ep or edp or K"), (0.25, "0.250 x the oracle: 1/world or 1/dp"), (0, "zero")],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_a_factor_of_all(self, factor: float, words: str, dtype: torch.dtype) -> None:
        """One factor of every gradient is told once, with every size that it equals, and blamed on finishing."""
        outcome = edit_final(clean(REPLICATED, dtype=dtype), lambda rank, key, value: factor * value)
        wrong = caught(judge_expert_gradients, outcome)
        assert isinstance(wrong, WrongGradient)
        assert f"every expert gradient is {words}" in wrong.sentence
        assert ("finish", (0, 1, 2, 3), factor) == (wrong.stage, wrong.ranks, wrong.ratio)

    @pytest.mark.parametrize(
        ("chosen", "words", "ranks"),
        [
            (lambda rank, key: key[1] == 3, "every gradient of expert 3 is 2.000 x the oracle: ep", (0, 2)),
            (lambda rank, key: rank == 1, "every expert gradient on rank 1 is 2.000 x the oracle: ep", (1,)),
            (lambda rank, key: key[0] == "down", "every gradient of down is 2.000 x the oracle: ep", (0, 1, 2, 3)),
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
            (lambda key: (key[0], key[1] ^ 1), "holds the gradient of expert 1: gate of expert 0 on rank 0"),
            (lambda key: swap_gate_and_up(key), "holds the gradient of up: gate of expert 0 on rank 0"),
        ],
    )
    def test_gradients_in_each_others_place(self, role: Callable[[ParameterKey], ParameterKey], words: str) -> None:
        """A gradient that belongs to another expert, or to another projection, is recognised."""
        outcome = clean()
        finals = [rank.grads_final or {} for rank in outcome.ranks]
        change = lambda rank, key, value: finals[rank][role(key)].value  # noqa: E731
        assert words in caught(judge_expert_gradients, edit_final(outcome, change)).sentence

    def test_experts_added_to_each_other(self) -> None:
        """Gradients reduced over ranks that hold different experts are recognised."""
        outcome = clean()
        finals = [rank.grads_final or {} for rank in outcome.ranks]

        def change(rank: int, key: ParameterKey, value: Tensor) -> Tensor:
            assert key[1] is not None
            return value + present(finals[1 - rank][key[0], (key[1] + 4) % 8].value)

        wrong = caught(judge_expert_gradients, edit_final(outcome, change))
        assert "holds the sum over experts [0, 4], which have the same place on their ranks" in wrong.sentence

    def test_parts_in_each_others_place(self) -> None:
        """The gradient of another shard is recognised."""
        outcome = clean(Layout(2, etp=2))
        finals = [rank.grads_final or {} for rank in outcome.ranks]
        wrong = caught(
            judge_expert_gradients, edit_final(outcome, lambda rank, key, value: finals[1 - rank][key].value)
        )
        assert "holds the gradient of part 1: gate of expert 0 (part 0 of 2) on rank 0" in wrong.sentence

    def test_absent(self) -> None:
        """None after finishing is a fault of its own kind."""
        outcome = edit_final(clean(), lambda rank, key, value: None if key == ("up", 5) else value)
        wrong = caught(judge_expert_gradients, outcome)
        assert isinstance(wrong, AbsentGradient)
        assert "up of expert 5 on rank 1 has the gradient None" in wrong.sentence
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
            (None, AbsentGradient, "gate of expert 3 on rank 0 is reached by no token and has the gradient None"),
            (1e-30, WrongGradient, "gate of expert 3 on rank 0 is reached by no token and has the gradient 1e-30"),
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
        assert "down of expert 6 is named by no rank" in wrong.sentence
        assert not judged(judge_windows, without(outcome, ("down", 6), (1,))).vacuous

    def test_names_must_last(self) -> None:
        """A parameter that is named before finishing and not afterwards is missed on that very rank."""
        outcome = clean(REPLICATED)
        kept = without(outcome, ("down", 6), (3,)).ranks[3]
        lost = replace(outcome, ranks=(*outcome.ranks[:3], replace(kept, grads_local=outcome.ranks[3].grads_local)))
        wrong = caught(judge_expert_gradients, lost)
        assert "rank 3 names down of expert 6 before finishing and not afterwards" in wrong.sentence

    def test_all_parts_are_needed(self) -> None:
        """One part of two is not the whole."""
        wrong = caught(judge_windows, without(clean(Layout(2, etp=2)), ("down", 6), (1,)))
        assert "down of expert 6 is named in the parts [(1, 0, 2)] only" in wrong.sentence


def without(outcome: Outcome, key: ParameterKey, ranks: tuple[int, ...]) -> Outcome:
    """Leave a parameter unnamed on some ranks."""

    def left(grads: Finals) -> Finals:
        return {name: grad for name, grad in grads.items() if name != key}

    return replace(
        outcome,
        ranks=tuple(
            replace(rank, grads_local=left(dict(rank.grads_local)), grads_final=left(dict(rank.grads_final or {})))
            if rank.rank in ranks
            else rank
            for rank in outcome.ranks
        ),
    )


def swap_gate_and_up(key: ParameterKey) -> ParameterKey:
    """Exchange the roles of gate and up."""
    return {"gate": "up", "up": "gate", "down": "down"}[key[0]], key[1]


def previous(key: ParameterKey) -> ParameterKey:
    """Give every expert the role of the one before."""
    assert key[1] is not None
    return key[0], (key[1] - 1) % 8


def cut(key: ParameterKey, value: Tensor) -> Tensor:
    """Set the second half of the hidden units to zero."""
    left = value.clone()
    (left[:, 8:] if key[0] == "down" else left[8:]).zero_()
    return left


def add(value: Tensor | None, change: Tensor) -> Tensor:
    """Add to a tensor that is there."""
    return present(value) + change


def present(value: Tensor | None) -> Tensor:
    """Refuse an absent tensor."""
    assert value is not None
    return value
