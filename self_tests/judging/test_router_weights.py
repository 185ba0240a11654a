"""Weights, gradients and loads of routers: what is wrong is told in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.contract import RoutingOptions
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.router.routers import (
    judge_bias,
    judge_load,
    judge_router_dx,
    judge_router_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    Tally,
    Uncovered,
    WrongCount,
    WrongForm,
    WrongGradient,
    WrongWeight,
)
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey
from self_tests.judging import simulated_routers as simulated
from self_tests.judging.breaking import caught, edit, judged, rerouted
from self_tests.judging.breaking_routers import BIASED, edit_ranks, present, run, weighing
from self_tests.judging.simulated_routers import Formula, route_workload, simulate_routers


class TestWrongWeights:
    @pytest.mark.parametrize(
        ("fields", "formula", "words"),
        [
            ({}, weighing(lambda s, ids, c: shares(s.gather(1, ids))), "the weights were normalised"),
            (
                {"routing.normalise": True},
                weighing(lambda s, ids, c: s.gather(1, ids)),
                "the weights were not normalised",
            ),
            ({"routing.scale": 2.5}, weighing(lambda s, ids, c: s.gather(1, ids)), "the weights were not scaled"),
            (
                {"routing.scale": 2.5},
                weighing(lambda s, ids, c: 6.25 * s.gather(1, ids)),
                "the weights were scaled twice",
            ),
            (
                {"routing.scale": 2.5, "routing.normalise": True},
                weighing(lambda s, ids, c: s.gather(1, ids)),
                "the weights were neither normalised nor scaled",
            ),
            (
                {"routing.score": "sigmoid", "routing.normalise": True},
                weighing(lambda s, ids, c: shares(s).gather(1, ids)),
                "the weights were divided by the sum over all experts",
            ),
            (
                {"routing.score": "softmax_topk"},
                weighing(lambda s, ids, c: s.softmax(1).gather(1, ids)),
                "the scores were softmax over all experts",
            ),
            ({}, Formula(scores=lambda logits, c: logits.sigmoid()), "the scores were sigmoid"),
            ({}, Formula(scores=lambda logits, c: logits), "the weights were the raw logits"),
            (
                {},
                Formula(scores=lambda logits, c: logits.softmax(1).softmax(1)),
                "the weights were the softmax of the scores over all experts",
            ),
            ({}, weighing(lambda s, ids, c: 0 * s.gather(1, ids) + 1), "all weights were 1"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_rules_are_guessed(self, fields: dict[str, Any], formula: Formula, words: str, dtype: torch.dtype) -> None:
        """By which rule the chosen were weighed instead is said."""
        wrong = caught(judge_router_weights, run(formula, dtype=dtype, tokens=40, **fields))
        assert isinstance(wrong, WrongWeight)
        assert f"the weights are wrong; likely cause: {words}; for example" in wrong.sentence
        assert "route" == wrong.stage

    @pytest.mark.parametrize(
        ("leak", "words"),
        [
            (lambda s, bias, ids: (s + bias).gather(1, ids), "the weights included the expert bias"),
            (
                lambda s, bias, ids: (s.logit() + bias).sigmoid().gather(1, ids),
                "the expert bias was added to the logits",
            ),
        ],
    )
    def test_a_leaking_bias(self, leak: Callable[[Tensor, Tensor, Tensor], Tensor], words: str) -> None:
        """A bias that shows in weights is found, though the selection is right."""
        work = route_workload(**BIASED)
        bias_E = work.parameters["balance_bias", None]
        outcome = simulate_routers(work, weighing(lambda s, ids, c: leak(s, bias_E, ids)))
        assert not judged(judge_selection, outcome).vacuous
        for judge in (judge_router_weights, judge_bias):
            assert f"the weights are wrong; likely cause: {words}; for example" in caught(judge, outcome).sentence

    def test_a_leaking_bias_in_a_gradient(self) -> None:
        """The same mistake has the same words in the weights and in the gradient."""
        work = route_workload(**{**BIASED, "routing.normalise": True})
        bias_E = work.parameters["balance_bias", None].abs()  # so that no sum of weights is near zero
        work = replace(work, parameters={**work.parameters, ("balance_bias", None): bias_E})
        outcome = simulate_routers(work, weighing(lambda s, ids, c: shares((s + bias_E).gather(1, ids))))
        assert (
            "dx is wrong; likely cause: the weights included the expert bias"
            in caught(judge_router_dx, outcome).sentence
        )

    def test_weights_at_other_slots(self) -> None:
        """Weights sorted otherwise than their experts are recognised."""
        turned = weighing(lambda s, ids, c: s.gather(1, ids).flip(1))
        assert (
            "likely cause: the weights of a token were in other slots than its experts"
            in caught(judge_router_weights, run(turned)).sentence
        )

    def test_a_factor(self) -> None:
        """One factor of all weights is named."""
        wrong = caught(judge_router_weights, run(weighing(lambda s, ids, c: s.gather(1, ids) / 2)))
        assert "every element of the weights is 0.500 x the expected value: 1/K" in wrong.sentence
        assert 0.5 == wrong.ratio

    def test_a_narrower_dtype_is_recognised(self) -> None:
        """Logits that were computed in bfloat16 are told by the precision that they left."""
        narrow = Formula(scores=lambda logits_TE, c: logits_TE.bfloat16().float().softmax(1))
        for judge in (judge_router_weights, judge_router_dx, judge_router_gradient):
            words = "computed with the precision of bfloat16 or float16 instead of float32"
            assert words in caught(judge, run(narrow)).sentence

    def test_one_weight_is_located(self) -> None:
        """One wrong weight is told with its token and slot."""
        changed = torch.zeros(24, 2)
        changed[7, 1] = 0.125
        outcome = edit(
            run(),
            0,
            lambda seen: rerouted(seen, weights_TK=seen.router.weights_TK + changed),
        )
        wrong = caught(judge_router_weights, outcome)
        assert "the weights of rank 0 token 7 are " in wrong.sentence
        assert "at [1]" in wrong.sentence

    def test_form(self) -> None:
        """Weights that are missing or of another shape are a matter of form."""
        for value in (None, torch.zeros(24, 3)):
            outcome = edit(run(), 0, lambda seen, value=value: rerouted(seen, weights_TK=value))  # type: ignore[misc]
            assert isinstance(caught(judge_router_weights, outcome), WrongForm)


def shares(scores: Tensor) -> Tensor:
    """Divide by the sum of the row."""
    return scores / scores.sum(1, keepdim=True)


class TestWrongGradients:
    def test_absent(self) -> None:
        """A gradient that never reached the tokens is absent."""
        wrong = caught(judge_router_dx, edit(run(), 1, lambda seen: replace(seen, dx_TD=Grad(None))))
        assert isinstance(wrong, AbsentGradient)
        assert ("gradient", (1,)) == (wrong.stage, wrong.ranks)

    def test_a_sum_without_gradient(self) -> None:
        """Normalising by a detached sum leaves the weights right and is recognised by what comes back."""
        detached = weighing(lambda s, ids, c: s.gather(1, ids) / s.gather(1, ids).detach().sum(1, keepdim=True))
        outcome = run(detached, routing=RoutingOptions(normalise=True))
        assert not judged(judge_router_weights, outcome).vacuous
        for judge in (judge_router_dx, judge_router_gradient):
            wrong = caught(judge, outcome)
            assert "the sum of the normalisation was treated as a constant" in wrong.sentence
            assert "gradient" == wrong.stage

    def test_a_factor(self) -> None:
        """One factor of dx is named."""
        outcome = run()
        for rank in range(2):
            outcome = edit(outcome, rank, lambda seen: replace(seen, dx_TD=Grad(2 * present(seen.dx_TD.value))))
        assert (
            "every element of dx is 2.000 x the expected value: K or ep or dp"
            in caught(judge_router_dx, outcome).sentence
        )

    @pytest.mark.parametrize(
        ("finish", "words"),
        [
            (
                lambda rank, gradients: gradients[rank],
                "it contains only the tokens of its own rank (it was not reduced over ranks)",
            ),
            (
                lambda rank, gradients: gradients[rank] + gradients[rank ^ 1],
                "only the tokens of its own ep_etp or ep or tp group",
            ),
            (lambda rank, gradients: sum(gradients) / 4, "0.250 x the expected value: 1/world"),
            (lambda rank, gradients: sum(gradients) * 0, "zero"),
            (lambda rank, gradients: sum(gradients) - gradients[2], "the tokens of rank 2 are missing in it"),
            (
                lambda rank, gradients: gradients[rank] / 2,
                "tokens of its own rank (it was not reduced over ranks), and it is multiplied by 0.500 (1/dp or 1/tp",
            ),
        ],
    )
    def test_what_finishing_left_out_is_told(self, finish: simulated.Finish, words: str) -> None:
        """Ranks, groups and factors that finishing missed are named, and the stage is "finish"."""
        wrong = caught(judge_router_gradient, run(Formula(finish=finish), Layout(4, tp=2, ep=2)))
        assert isinstance(wrong, WrongGradient)
        assert words in wrong.sentence
        assert "finish" == wrong.stage

    def test_one_rank_only(self) -> None:
        """Only the rank that ends with something else is to blame."""
        outcome = run(Formula(finish=lambda rank, gradients: sum(gradients) if rank else 3 * sum(gradients)))  # type: ignore[arg-type, return-value]
        wrong = caught(judge_router_gradient, outcome)
        assert (0,) == wrong.ranks
        assert "the gradient of router on rank 0 is 3.000 x the" in wrong.sentence

    def test_not_offered_absent_or_unnamed(self) -> None:
        """No finishing is not judged; None is absent; a rank that does not name the router leaves it uncovered."""
        outcome = run()
        silent = edit_ranks(outcome, lambda rank: replace(rank, grads_final=None, finish_refusal="no trainer"))
        with pytest.raises(NotOffered, match="no trainer"):
            judge_router_gradient(read(silent), Tally())
        none = edit_ranks(outcome, lambda rank: replace(rank, grads_final={("router", None): Grad(None)}))
        assert isinstance(caught(judge_router_gradient, none), AbsentGradient)
        unnamed = edit_ranks(outcome, lambda rank: replace(rank, grads_final={}, grads_local={}))
        assert isinstance(caught(judge_router_gradient, unnamed), Uncovered)

    @pytest.mark.parametrize(
        ("final", "error", "words"),
        [
            (None, AbsentGradient, "rank 1 finished no gradients, while rank 0 did"),
            ({}, Uncovered, "the weight of the router is not yielded by 'named' on ranks [1] after finishing"),
        ],
        ids=["nothing", "not the router"],
    )
    def test_one_rank_that_does_not_finish_is_told(
        self, final: dict[ParameterKey, Grad] | None, error: type[Exception], words: str
    ) -> None:
        """What one rank finishes all must, though nothing that is there is wrong."""
        outcome = run()
        outcome = replace(outcome, ranks=(outcome.ranks[0], replace(outcome.ranks[1], grads_final=final)))
        wrong = caught(judge_router_gradient, outcome)
        assert error is type(wrong)
        assert words in wrong.sentence
        assert ("finish", (1,)) == (wrong.stage, wrong.ranks)

    def test_microbatches_that_only_go_forward_are_not_in_it(self) -> None:
        """The gradient is over what went backward; the other microbatches are in no sum."""
        work = replace(route_workload(microbatches=2), schedule="F0 F1 B1")
        silent = tuple(replace(batch, upstream=0 * batch.upstream) for batch in work.batches[0])
        outcome = simulate_routers(replace(work, batches=(silent, work.batches[1])))
        assert not judged(judge_router_gradient, replace(outcome, workload=work)).vacuous
        leaked = replace(simulate_routers(work), workload=work)
        assert "microbatches without a backward are in it too" in caught(judge_router_gradient, leaked).sentence


class TestLoad:
    def test_wrong_counts_are_told(self) -> None:
        """Reported and true load stand side by side."""
        outcome = edit(run(), 1, lambda seen: rerouted(seen, counts_E=2 * seen.router.counts_E))
        wrong = caught(judge_load, outcome)
        assert isinstance(wrong, WrongCount)
        assert "rank 1 reports the load" in wrong.sentence
        assert (1,) == wrong.ranks

    def test_no_report_is_not_offered(self) -> None:
        """A router that reports no load on any rank is not judged by it."""
        outcome = run()
        for rank in (0, 1):
            outcome = edit(outcome, rank, lambda seen: rerouted(seen, counts_E=None))
        with pytest.raises(NotOffered, match="no load"):
            judge_load(read(outcome), Tally())

    def test_no_report_of_one_rank_excuses_nobody(self) -> None:
        """A rank without a report is told, and so is the wrong report of another."""
        outcome = edit(run(), 1, lambda seen: rerouted(seen, counts_E=None))
        wrong = caught(judge_load, outcome)
        assert isinstance(wrong, WrongCount)
        assert "rank 1 reports no load, while other ranks or microbatches have one" in wrong.sentence
        assert (1,) == wrong.ranks
        both = caught(
            judge_load,
            edit(outcome, 0, lambda seen: rerouted(seen, counts_E=2 * seen.router.counts_E)),
        )
        assert "rank 0 reports the load" in both.sentence
        assert (0, 1) == both.ranks
