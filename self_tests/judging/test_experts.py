"""Runs with the backend's own experts: what is right passes and is counted, what is wrong is told in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.shared.experts.expected import solve
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_dweights,
    judge_expert_dx,
    judge_expert_gradients,
    judge_expert_outputs,
    judge_idle_expert_gradients,
    judge_replicas,
    judge_weight_place,
    judge_windows,
)
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    WrongForm,
    WrongOutput,
)
from moe_conformance.reference.experts import Expert, Parameters
from moe_conformance.scenarios.outcome import Grad, Microbatch, RankOutcome
from self_tests.judging.breaking import caught, edit, judged
from self_tests.judging.breaking_experts import (
    REPLICATED,
    add,
    clean,
    cut,
    edit_batches,
    edit_final,
    never,
    present,
    previous,
    swap_gate_and_up,
    with_parameters,
)
from self_tests.judging.simulated_experts import Arithmetic, own_workload, simulate_experts

OF_TOKENS = (judge_expert_outputs, judge_expert_dx, judge_expert_dweights)
OF_PARAMETERS = (judge_expert_gradients, judge_windows)
LAYOUTS = [Layout(1), Layout(2, ep=2), Layout(4, ep=2), Layout(4, ep=2, etp=2), Layout(4, pp=2, ep=2), Layout(4, etp=4)]


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
        elements = judged(judge_expert_outputs, outcome).elements
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
            "every expert gradient is 0.250 x the expected value: 1/dp"
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
        with pytest.raises(NotOffered, match="no replicas"):
            judged(judge_replicas, clean())

    def test_a_rank_without_tokens_has_no_gradients_to_show(self) -> None:
        """Where a rank has no tokens, None is as good as an empty gradient."""
        outcome = clean(tokens=1)
        silent = edit(outcome, 1, lambda seen: replace(seen, dx_TD=Grad(None), dweights_TK=Grad(None)))
        assert 32 == judged(judge_expert_dx, silent).elements
        assert 2 == judged(judge_expert_dweights, silent).elements

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
        wrong = caught(judge_expert_outputs, edit(clean(), 1, lambda seen: replace(seen, y=add(seen.y, changed))))
        assert isinstance(wrong, WrongOutput)
        assert "y of rank 1 token 4 is" in wrong.sentence
        assert "at [7]" in wrong.sentence
        assert ("experts", (1,)) == (wrong.stage, wrong.ranks)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda y: 2 * y, "every element of y on rank 0 is 2.000 x the expected value: ep or K or dp"),
            (lambda y: 0 * y, "every element of y on rank 0 is zero"),
            (lambda y: y / 0, "at [0] (not finite); 11 more of the same kind"),
            (lambda y: y * torch.arange(12)[:, None], "y of rank 0 token 2 is 2.000 x the expected value"),
        ],
    )
    def test_factors_of_a_rank_or_of_tokens(self, change: Callable[[Tensor], Tensor], words: str) -> None:
        """A factor that one rank has, or each of its tokens by itself, is told."""
        wrong = caught(judge_expert_outputs, edit(clean(), 0, lambda seen: replace(seen, y=change(present(seen.y)))))
        assert (0,) == wrong.ranks
        assert words in wrong.sentence

    def test_a_factor_of_all_is_named(self) -> None:
        """A factor that all tokens have is told once, with every size that it equals."""
        outcome = clean(REPLICATED)
        for rank in range(4):
            outcome = edit(outcome, rank, lambda seen: replace(seen, y=4 * present(seen.y)))
        wrong = caught(judge_expert_outputs, outcome)
        assert "every element of y is 4.000 x the expected value: dp" in wrong.sentence
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
            for judge in (judge_expert_outputs, judge_expert_dx):
                assert f"likely cause: {words}; for example" in caught(judge, outcome).sentence

    def test_the_other_place_of_weights_is_guessed(self) -> None:
        """Weights applied at the input by a session that says output are recognised in all that they change."""
        outcome = simulate_experts(own_workload(), Arithmetic(place="input"))
        lying = replace(outcome, ranks=tuple(replace(rank, weights_at="combine") for rank in outcome.ranks))
        for judge in (
            judge_expert_outputs,
            judge_weight_place,
            judge_expert_dx,
            judge_expert_dweights,
            judge_expert_gradients,
        ):
            assert "likely cause: the weights were applied at the experts' input" in caught(judge, lying).sentence

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
        assert "likely cause: only the output of etp shard 0 was used" in caught(judge_expert_outputs, outcome).sentence

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda seen: replace(seen, y=None), "y of rank 1 is None"),
            (lambda seen: replace(seen, y=seen.y[1:]), "y of rank 1 has the shape (10, 32) instead of (11, 32)"),
        ],
    )
    def test_form(self, change: Callable[[Microbatch], Microbatch], words: str) -> None:
        """A missing or misshapen output is a matter of form."""
        wrong = caught(judge_expert_outputs, edit(clean(), 1, change))
        assert isinstance(wrong, WrongForm)
        assert words in wrong.sentence


WAYS: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "no gradient passed through the gate": lambda z, up: ((z * z.sigmoid()).detach(), up),
    "no gradient passed through the up projection": lambda z, up: (z * z.sigmoid(), up.detach()),
    "the gradient of the activation was left out": lambda z, up: (z + (z * z.sigmoid() - z).detach(), up),
}


class TestWrongTokenGradients:
    @pytest.mark.parametrize("words", WAYS)
    def test_a_way_that_the_gradient_did_not_take_is_guessed(self, words: str) -> None:
        """Experts that are right forward and cut off backward are told by where they are."""

        def build(parameters: Parameters) -> Expert:
            def expert(rows_RD: Tensor, e: int) -> Tensor:
                halves = (F.linear(rows_RD, parameters[name, e]) for name in ("gate", "up"))
                activated_RF, up_RF = WAYS[words](*halves)
                return F.linear(activated_RF * up_RF, parameters["down", e])

            return expert

        outcome = clean()
        dx = solve(outcome.workload, [(0, 0), (0, 1)], "output", build=build).dx_TD.split([12, 11])
        for rank in range(2):
            outcome = edit(outcome, rank, partial(replace, dx_TD=Grad(dx[rank])))
        assert f"dx is wrong; likely cause: {words}; for example" in caught(judge_expert_dx, outcome).sentence

    @pytest.mark.parametrize("judge", [judge_expert_dx, judge_expert_dweights])
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
        assert "slot k had the gradient of slot (k + 1) modulo 2" in caught(judge_expert_dweights, outcome).sentence
