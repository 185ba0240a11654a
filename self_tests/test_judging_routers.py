"""Runs of routers: what is right passes and is counted, what is wrong is told in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.judging.reading import read
from moe_conformance.judging.routers import (
    judge_bias,
    judge_group_limit,
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
    WrongSelection,
    WrongWeight,
)
from moe_conformance.scenarios.outcome import Grad, Outcome, RankOutcome
from moe_conformance.topology import Layout
from self_tests import simulated_routers as simulated
from self_tests.breaking import caught, edit, judged
from self_tests.simulated_routers import Formula, route_workload, simulate_routers

ALWAYS = (judge_selection, judge_load, judge_router_weights, judge_router_dx, judge_router_gradient)
BIASED = {"score": "sigmoid", "balance_bias": True}
GROUPED = {**BIASED, "experts": 16, "top_k": 4, "groups": (4, 2), "normalise": True}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-normalised-scaled": {"normalise": True, "scale": 2.5},
    "softmax-topk": {"score": "softmax_topk", "scale": 2.5},
    "sigmoid-biased": BIASED,
    "sqrtsoftplus-biased": {**BIASED, "score": "sqrtsoftplus", "normalise": True},
    "groups-top2": GROUPED,
    "groups-topk": {**GROUPED, "top_k": 6, "group_score": "topk_sum"},
    "groups-max": {**GROUPED, "group_score": "max"},
    "top-all": {"top_k": 8},
    "top-1": {"top_k": 1, "score": "sigmoid", "normalise": True},
}


def run(formula: Formula | None = None, layout: Layout | None = None, **fields: Any) -> Outcome:
    """Run routers, float32 unless said otherwise."""
    return simulate_routers(route_workload(layout, **fields), formula)


def edit_ranks(outcome: Outcome, change: Callable[[RankOutcome], RankOutcome]) -> Outcome:
    """Change what every rank brought back."""
    return replace(outcome, ranks=tuple(map(change, outcome.ranks)))


def choosing(by: Callable[[Tensor, Tensor, Config], Tensor]) -> Formula:
    """Choose the K highest of some other scores."""
    return Formula(
        choose=lambda scores_TE, bias_E, config: by(scores_TE.detach(), bias_E, config).topk(config.top_k, 1).indices
    )


def weighing(change: Callable[[Tensor, Tensor, Config], Tensor]) -> Formula:
    """Weigh by another formula, given scores, ids and config."""
    return Formula(weigh=change)


class TestRight:
    @pytest.mark.parametrize(
        "layout", [Layout(1), Layout(4, tp=2, ep=2), Layout(4, pp=2)], ids=lambda layout: layout.name
    )
    @pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_every_judge_passes_and_counts_every_rank(
        self, layout: Layout, fields: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """In every configuration, dtype and layout, each judge compares on each rank."""
        if layout.pp > 1:
            fields = {**fields, "tokens": 12}
        work = route_workload(layout, microbatches=2, dtype=dtype, **fields)
        finish = Formula(finish=lambda rank, gradients: stage_sum(layout, rank, gradients))
        outcome = simulate_routers(work, finish)
        for judge in ALWAYS:
            assert set(range(layout.world)) == judged(judge, outcome).ranks

    def test_pairs_and_elements_are_counted_once(self) -> None:
        """Selections count T K pairs, weights T K, dx T D, loads E, gradients E D elements of each rank."""
        outcome = run(tokens=9)
        tallies = [judged(judge, outcome) for judge in ALWAYS]
        assert [34, 0, 0, 0, 0] == [tally.pairs for tally in tallies]
        assert [0, 16, 34, 17 * 32, 2 * 8 * 32] == [tally.elements for tally in tallies]

    def test_slots_may_come_in_any_order(self) -> None:
        """Ids and weights that are turned round together are the same routing."""
        turned = Formula(choose=lambda *given: simulated.choose(*given).flip(1))
        for judge in ALWAYS:
            assert not judged(judge, run(turned)).vacuous

    @pytest.mark.parametrize(("dtype", "legal"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
    def test_near_ties_are_free(self, dtype: torch.dtype, legal: bool) -> None:
        """The second best of two experts that differ by one bfloat16 rounding may be chosen in bfloat16 alone."""
        work = route_workload(Layout(1), tokens=1, dtype=torch.bfloat16, top_k=1)
        x_TD = work.batches[0][0].x_TD
        router_ED = torch.zeros_like(work.parameters["router", None])
        router_ED[:2] = 3 * x_TD[0] / x_TD[0].square().sum()
        router_ED[1, int(x_TD[0].abs().argmax())] *= 1 + 2**-6
        batches = ((replace(work.batches[0][0], x_TD=x_TD.to(dtype)),),)
        parameters = {("router", None): router_ED.to(dtype)}
        tied = replace(work, batches=batches, parameters=parameters, config=replace(work.config, dtype=dtype))
        second = choosing(lambda scores_TE, bias_E, config: torch.tensor([[2.0, 1, 0, 0, 0, 0, 0, 0]]))
        assert bool((x_TD[0].double() @ router_ED[:2].double().T).diff() > 0)  # expert 1 is the best
        if legal:
            assert 1 == judged(judge_selection, simulate_routers(tied, second)).pairs
        else:
            assert "token 0 chose 0" in caught(judge_selection, simulate_routers(tied, second)).sentence

    def test_bias_counts_only_tokens_that_it_decided(self) -> None:
        """Tokens whose choice is the same without the bias prove nothing and are not counted."""
        outcome = run(**BIASED)
        pairs = judged(judge_selection, outcome).pairs
        assert 0 < judged(judge_bias, outcome).pairs < pairs
        same = replace(
            outcome.workload, parameters={**outcome.workload.parameters, ("balance_bias", None): torch.ones(8)}
        )
        assert judged(judge_bias, simulate_routers(same)).vacuous

    def test_groups_count_only_tokens_that_they_limited(self) -> None:
        """Tokens whose best experts lie in the best groups anyway are not counted."""
        outcome = run(**GROUPED)
        assert 0 < judged(judge_group_limit, outcome).pairs < judged(judge_selection, outcome).pairs
        assert judged(judge_group_limit, run(**{**GROUPED, "groups": (4, 4)})).vacuous

    def test_averages_are_judged_as_averages(self) -> None:
        """A session that averages over dp * cp is held against the mean."""
        outcome = run(Formula(finish=lambda rank, gradients: sum(gradients[1:], gradients[0]) / 2))
        averaging = edit_ranks(outcome, lambda rank: replace(rank, loss_convention="mean_over_dp"))
        assert not judged(judge_router_gradient, averaging).vacuous
        assert "0.500 x the oracle: 1/world or 1/dp" in caught(judge_router_gradient, outcome).sentence


def stage_sum(layout: Layout, rank: int, gradients: list[Tensor]) -> Tensor:
    """Add up the gradients of a rank's pipeline stage."""
    size = layout.world // layout.pp
    stage = gradients[rank // size * size : (rank // size + 1) * size]
    return sum(stage[1:], stage[0])


class TestWrongSelection:
    def test_one_token_is_told_with_its_scores(self) -> None:
        """One wrong choice names rank, token, both experts and their scores."""

        def change(seen: Any) -> Any:
            ids_TK = seen.routed_ids_TK.clone()
            ids_TK[5] = seen.logits_TE[5].argsort()[:2]
            return replace(seen, routed_ids_TK=ids_TK)

        wrong = caught(judge_selection, edit(run(), 1, change))
        assert isinstance(wrong, WrongSelection)
        assert "rank 1 token 5 chose" in wrong.sentence
        assert "instead of" in wrong.sentence
        assert "rounding allows" in wrong.sentence
        assert ("route", (1,)) == (wrong.stage, wrong.ranks)

    @pytest.mark.parametrize(
        ("ids_K", "words"),
        [([3, 3], "chose [3, 3], which is not 2 different experts of 8"), ([3, 8], "[3, 8]"), ([-1, 3], "[-1, 3]")],
    )
    @pytest.mark.parametrize("judge", ALWAYS)
    def test_impossible_choices(self, judge: Callable[..., None], ids_K: list[int], words: str) -> None:
        """An expert twice, one that does not exist and an empty slot fail in every judge, not with an exception."""
        outcome = edit(run(), 0, lambda seen: replace(seen, routed_ids_TK=torch.tensor([ids_K] * 24)))
        wrong = caught(judge, outcome)
        assert isinstance(wrong, WrongSelection)
        assert words in wrong.sentence

    def test_form(self) -> None:
        """A selection of another shape is a matter of form."""
        outcome = edit(run(), 0, lambda seen: replace(seen, routed_ids_TK=seen.routed_ids_TK[:, :1]))
        assert isinstance(caught(judge_selection, outcome), WrongForm)

    @pytest.mark.parametrize(
        ("formula", "words"),
        [
            (choosing(lambda scores_TE, bias_E, config: scores_TE), "chosen without the bias"),
            (choosing(lambda scores_TE, bias_E, config: scores_TE - bias_E), "chosen with the bias subtracted"),
            (
                choosing(lambda scores_TE, bias_E, config: scores_TE.logit() + bias_E),
                "chosen with the bias added to the logits",
            ),
            (choosing(lambda scores_TE, bias_E, config: -scores_TE - bias_E), "chosen by the lowest scores"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_rules_of_the_bias_are_guessed(self, formula: Formula, words: str, dtype: torch.dtype) -> None:
        """How the bias was used instead is said."""
        outcome = run(formula, dtype=dtype, **BIASED)
        for judge in (judge_selection, judge_bias):
            assert f"all experts are as if {words}" in caught(judge, outcome).sentence

    @pytest.mark.parametrize(
        ("formula", "words"),
        [
            (choosing(lambda scores_TE, bias_E, config: scores_TE + bias_E), "chosen from all groups"),
            (
                choosing(lambda *given: zero_where_closed(*given)),
                "chosen with the experts of closed groups at 0 instead of -inf",
            ),
            (
                Formula(choose=lambda s, b, config: simulated.choose(s, b, replace(config, group_score="max"))),
                "chosen from groups that were scored by max",
            ),
            (
                choosing(lambda *given: groups_without_bias(*given)),
                "chosen from groups that were scored without the bias",
            ),
        ],
    )
    def test_rules_of_the_groups_are_guessed(self, formula: Formula, words: str) -> None:
        """How the groups were used instead is said; the bias is low enough that selection scores are negative."""
        work = route_workload(tokens=60, **GROUPED)
        low = {**work.parameters, ("balance_bias", None): work.parameters["balance_bias", None] - 0.7}
        outcome = simulate_routers(replace(work, parameters=low), formula)
        for judge in (judge_selection, judge_group_limit):
            assert f"all experts are as if {words}" in caught(judge, outcome).sentence


def zero_where_closed(scores_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """Put the experts of closed groups at 0."""
    return (scores_TE + bias_E) * open_groups(scores_TE + bias_E)


def groups_without_bias(scores_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """Choose groups by plain scores, experts by biased ones."""
    return (scores_TE + bias_E).masked_fill(~open_groups(scores_TE), -torch.inf)


def open_groups(choice_TE: Tensor) -> Tensor:
    """Say which experts lie in the best 2 of 4 groups by their two best."""
    worth_TG = choice_TE.unflatten(1, (4, 4)).topk(2, 2).values.sum(2)
    open_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter(1, worth_TG.topk(2, 1).indices, True)
    return open_TG.repeat_interleave(4, 1)


class TestWrongWeights:
    @pytest.mark.parametrize(
        ("fields", "formula", "words"),
        [
            ({}, weighing(lambda s, ids, c: shares(s.gather(1, ids))), "they were normalised"),
            ({"normalise": True}, weighing(lambda s, ids, c: s.gather(1, ids)), "they were not normalised"),
            ({"scale": 2.5}, weighing(lambda s, ids, c: s.gather(1, ids)), "they were not scaled"),
            ({"scale": 2.5}, weighing(lambda s, ids, c: 6.25 * s.gather(1, ids)), "they were scaled twice"),
            (
                {"scale": 2.5, "normalise": True},
                weighing(lambda s, ids, c: s.gather(1, ids)),
                "they were neither normalised nor scaled",
            ),
            (
                {"score": "sigmoid", "normalise": True},
                weighing(lambda s, ids, c: shares(s).gather(1, ids)),
                "they were divided by the sum over all experts",
            ),
            (
                {"score": "softmax_topk"},
                weighing(lambda s, ids, c: s.softmax(1).gather(1, ids)),
                "their scores were softmax over all experts",
            ),
            ({}, Formula(scores=lambda logits, c: logits.sigmoid()), "their scores were sigmoid"),
            ({}, Formula(scores=lambda logits, c: logits), "they were the raw logits"),
            (
                {},
                Formula(scores=lambda logits, c: logits.softmax(1).softmax(1)),
                "they were the softmax of the scores over all experts",
            ),
            ({}, weighing(lambda s, ids, c: 0 * s.gather(1, ids) + 1), "all were 1"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_rules_are_guessed(self, fields: dict[str, Any], formula: Formula, words: str, dtype: torch.dtype) -> None:
        """By which rule the chosen were weighed instead is said."""
        wrong = caught(judge_router_weights, run(formula, dtype=dtype, tokens=40, **fields))
        assert isinstance(wrong, WrongWeight)
        assert f"the weights are as if {words}" in wrong.sentence
        assert "route" == wrong.stage

    @pytest.mark.parametrize(
        ("leak", "words"),
        [
            (lambda s, bias, ids: (s + bias).gather(1, ids), "the bias leaked into them"),
            (lambda s, bias, ids: (s.logit() + bias).sigmoid().gather(1, ids), "the bias was added to the logits"),
        ],
    )
    def test_a_leaking_bias(self, leak: Callable[[Tensor, Tensor, Tensor], Tensor], words: str) -> None:
        """A bias that shows in weights is found, though the selection is right."""
        work = route_workload(**BIASED)
        bias_E = work.parameters["balance_bias", None]
        outcome = simulate_routers(work, weighing(lambda s, ids, c: leak(s, bias_E, ids)))
        assert not judged(judge_selection, outcome).vacuous
        for judge in (judge_router_weights, judge_bias):
            assert f"the weights are as if {words}" in caught(judge, outcome).sentence

    def test_weights_at_other_slots(self) -> None:
        """Weights sorted otherwise than their experts are recognised."""
        turned = weighing(lambda s, ids, c: s.gather(1, ids).flip(1))
        assert "lie at other slots than its experts" in caught(judge_router_weights, run(turned)).sentence

    def test_a_factor(self) -> None:
        """One factor of all weights is named."""
        wrong = caught(judge_router_weights, run(weighing(lambda s, ids, c: s.gather(1, ids) / 2)))
        assert "every element of the weights is 0.500 x the oracle: 1/K" in wrong.sentence
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
        outcome = edit(run(), 0, lambda seen: replace(seen, routed_weights_TK=seen.routed_weights_TK + changed))
        wrong = caught(judge_router_weights, outcome)
        assert "the weights of rank 0 token 7: " in wrong.sentence
        assert "at [1]" in wrong.sentence

    def test_form(self) -> None:
        """Weights that are missing or of another shape are a matter of form."""
        for value in (None, torch.zeros(24, 3)):
            outcome = edit(run(), 0, lambda seen, value=value: replace(seen, routed_weights_TK=value))
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
        outcome = run(detached, normalise=True)
        assert not judged(judge_router_weights, outcome).vacuous
        for judge in (judge_router_dx, judge_router_gradient):
            wrong = caught(judge, outcome)
            assert "no gradient went through the sum that the weights are divided by" in wrong.sentence
            assert "gradient" == wrong.stage

    def test_a_factor(self) -> None:
        """One factor of dx is named."""
        outcome = run()
        for rank in range(2):
            outcome = edit(outcome, rank, lambda seen: replace(seen, dx_TD=Grad(2 * present(seen.dx_TD.value))))
        assert (
            "every element of dx is 2.000 x the oracle: world or dp or ep or K"
            in caught(judge_router_dx, outcome).sentence
        )

    @pytest.mark.parametrize(
        ("finish", "words"),
        [
            (lambda rank, gradients: gradients[rank], "only the tokens of its own rank are in it"),
            (
                lambda rank, gradients: gradients[rank] + gradients[rank ^ 1],
                "only the tokens of its own ep_etp or ep or tp group",
            ),
            (lambda rank, gradients: sum(gradients) / 4, "0.250 x the oracle: 1/world"),
            (lambda rank, gradients: sum(gradients) * 0, "zero"),
            (lambda rank, gradients: sum(gradients) - gradients[2], "the tokens of rank 2 are missing in it"),
            (
                lambda rank, gradients: gradients[rank] / 2,
                "own rank are in it, and it is 0.500 x the oracle: 1/tp or 1/dp",
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
        outcome = run(Formula(finish=lambda rank, gradients: sum(gradients) if rank else 3 * sum(gradients)))
        wrong = caught(judge_router_gradient, outcome)
        assert (0,) == wrong.ranks
        assert "the gradient is 3.000 x the oracle" in wrong.sentence

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


class TestLoad:
    def test_wrong_counts_are_told(self) -> None:
        """Reported and true load stand side by side."""
        outcome = edit(run(), 1, lambda seen: replace(seen, counts_E=2 * seen.counts_E))
        wrong = caught(judge_load, outcome)
        assert isinstance(wrong, WrongCount)
        assert "rank 1 reports the load" in wrong.sentence
        assert (1,) == wrong.ranks

    def test_no_report_is_not_offered(self) -> None:
        """A router that reports no load is not judged by it."""
        outcome = edit(run(), 0, lambda seen: replace(seen, counts_E=None))
        with pytest.raises(NotOffered, match="no load"):
            judge_load(read(outcome), Tally())


def present(value: Tensor | None) -> Tensor:
    """Refuse an absent tensor."""
    assert value is not None
    return value
