"""Runs of routers: what is right passes and is counted, what is wrong is told in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.shared.router.routers import (
    judge_bias,
    judge_group_limit,
    judge_load,
    judge_router_dx,
    judge_router_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.judging.verdict import Indecisive, WrongForm, WrongSelection
from self_tests.judging import simulated_routers as simulated
from self_tests.judging.breaking import caught, edit, judged, rerouted
from self_tests.judging.breaking_routers import BIASED, GROUPED, choosing, edit_ranks, run
from self_tests.judging.simulated_routers import Formula, route_workload, simulate_routers

ALWAYS = (judge_selection, judge_load, judge_router_weights, judge_router_dx, judge_router_gradient)
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-normalised-scaled": {"routing.normalise": True, "routing.scale": 2.5},
    "softmax-topk": {"routing.score": "softmax_topk", "routing.scale": 2.5},
    "sigmoid-biased": BIASED,
    "sqrtsoftplus-biased": {**BIASED, "routing.score": "sqrtsoftplus", "routing.normalise": True},
    "groups-top2": GROUPED,
    "groups-topk": {**GROUPED, "top_k": 6, "routing.group_score": "topk_sum"},
    "groups-max": {**GROUPED, "routing.group_score": "max"},
    "top-all": {"top_k": 8},
    "top-1": {"top_k": 1, "routing.score": "sigmoid", "routing.normalise": True},
}


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
        tied = replace(work, batches=batches, parameters=parameters, config=replace(work.config, dtype=dtype))  # type: ignore[arg-type]
        second = choosing(lambda scores_TE, bias_E, config: torch.tensor([[2.0, 1, 0, 0, 0, 0, 0, 0]]))
        assert bool((x_TD[0].double() @ router_ED[:2].double().T).diff() > 0)  # expert 1 is the best
        if legal:
            assert 1 == judged(judge_selection, simulate_routers(tied, second)).pairs
        else:
            assert "token 0 selected 0" in caught(judge_selection, simulate_routers(tied, second)).sentence

    def test_bias_counts_only_tokens_that_it_decided(self) -> None:
        """Tokens whose choice is the same without the bias prove nothing and are not counted."""
        outcome = run(**BIASED)
        pairs = judged(judge_selection, outcome).pairs
        assert 0 < judged(judge_bias, outcome).pairs < pairs
        same = replace(
            outcome.workload, parameters={**outcome.workload.parameters, ("balance_bias", None): torch.ones(8)}
        )
        with pytest.raises(Indecisive, match="would be legal without the rule"):
            judged(judge_bias, simulate_routers(same))

    def test_groups_count_only_tokens_that_they_limited(self) -> None:
        """Tokens whose best experts lie in the best groups anyway are not counted."""
        outcome = run(**GROUPED)
        assert 0 < judged(judge_group_limit, outcome).pairs < judged(judge_selection, outcome).pairs
        with pytest.raises(Indecisive):
            judged(judge_group_limit, run(**{**GROUPED, "routing.groups": (4, 4)}))

    def test_averages_are_judged_as_averages(self) -> None:
        """A session that averages over dp * cp is held against the mean."""
        outcome = run(Formula(finish=lambda rank, gradients: sum(gradients[1:], gradients[0]) / 2))
        averaging = edit_ranks(outcome, lambda rank: replace(rank, loss_convention="mean_over_dp"))
        assert not judged(judge_router_gradient, averaging).vacuous
        assert "0.500 x the expected value: 1/dp or 1/ep" in caught(judge_router_gradient, outcome).sentence


def stage_sum(layout: Layout, rank: int, gradients: list[Tensor]) -> Tensor:
    """Add up the gradients of a rank's pipeline stage."""
    size = layout.world // layout.pp
    stage = gradients[rank // size * size : (rank // size + 1) * size]
    return sum(stage[1:], stage[0])


class TestWrongSelection:
    def test_one_token_is_told_with_its_scores(self) -> None:
        """One wrong choice names rank, token, both experts and their scores."""

        def change(seen: Any) -> Any:
            ids_TK = seen.router.ids_TK.clone()
            ids_TK[5] = seen.router.logits_TE[5].argsort()[:2]
            return rerouted(seen, ids_TK=ids_TK)

        wrong = caught(judge_selection, edit(run(), 1, change))
        assert isinstance(wrong, WrongSelection)
        assert "rank 1 token 5 selected" in wrong.sentence
        assert "instead of" in wrong.sentence
        assert "rounding allows" in wrong.sentence
        assert ("route", (1,)) == (wrong.stage, wrong.ranks)

    @pytest.mark.parametrize(
        ("ids_K", "words"),
        [([3, 3], "selected [3, 3], which is not 2 different experts of 8"), ([3, 8], "[3, 8]"), ([-1, 3], "[-1, 3]")],
    )
    @pytest.mark.parametrize("judge", ALWAYS)
    def test_impossible_choices(self, judge: Callable[..., None], ids_K: list[int], words: str) -> None:
        """An expert twice, one that does not exist and an empty slot fail in every judge, not with an exception."""
        outcome = edit(run(), 0, lambda seen: rerouted(seen, ids_TK=torch.tensor([ids_K] * 24)))
        wrong = caught(judge, outcome)
        assert isinstance(wrong, WrongSelection)
        assert words in wrong.sentence

    def test_form(self) -> None:
        """A selection of another shape is a matter of form."""
        outcome = edit(run(), 0, lambda seen: rerouted(seen, ids_TK=seen.router.ids_TK[:, :1]))
        assert isinstance(caught(judge_selection, outcome), WrongForm)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
    def test_ids_of_another_type(self, dtype: torch.dtype) -> None:
        """Ids that number no experts, or not all of them, are a matter of form."""
        outcome = edit(run(), 0, lambda seen: rerouted(seen, ids_TK=seen.router.ids_TK.to(dtype)))
        wrong = caught(judge_selection, outcome)
        assert isinstance(wrong, WrongForm)
        assert f"the ids of rank 0 are {dtype}; expected torch.int64 or torch.int32" in wrong.sentence

    @pytest.mark.parametrize(
        ("formula", "words"),
        [
            (choosing(lambda scores_TE, bias_E, config: scores_TE), "the expert bias was left out"),
            (choosing(lambda scores_TE, bias_E, config: scores_TE - bias_E), "the expert bias was subtracted"),
            (
                choosing(lambda scores_TE, bias_E, config: scores_TE.logit() + bias_E),
                "the expert bias was added to the logits",
            ),
            (choosing(lambda scores_TE, bias_E, config: -scores_TE - bias_E), "the lowest scores were selected"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_rules_of_the_bias_are_guessed(self, formula: Formula, words: str, dtype: torch.dtype) -> None:
        """How the bias was used instead is said."""
        outcome = run(formula, dtype=dtype, **BIASED)
        for judge in (judge_selection, judge_bias):
            assert f"the selection is wrong; likely cause: {words}" in caught(judge, outcome).sentence

    @pytest.mark.parametrize(
        ("formula", "words"),
        [
            (choosing(lambda scores_TE, bias_E, config: scores_TE + bias_E), "the group limit was left out"),
            (
                choosing(lambda *given: zero_where_closed(*given)),
                "experts of unselected groups had the score 0 instead of -inf",
            ),
            (
                Formula(
                    choose=lambda s, b, config: simulated.choose(s, b, config.changed({"routing.group_score": "max"}))
                ),
                "the groups were scored by max",
            ),
            (
                choosing(lambda *given: groups_without_bias(*given)),
                "the groups were scored without the expert bias",
            ),
        ],
    )
    def test_rules_of_the_groups_are_guessed(self, formula: Formula, words: str) -> None:
        """How the groups were used instead is said; the bias is low enough that selection scores are negative."""
        work = route_workload(tokens=60, **GROUPED)
        low = {**work.parameters, ("balance_bias", None): work.parameters["balance_bias", None] - 0.7}
        outcome = simulate_routers(replace(work, parameters=low), formula)
        for judge in (judge_selection, judge_group_limit):
            assert f"the selection is wrong; likely cause: {words}" in caught(judge, outcome).sentence


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
