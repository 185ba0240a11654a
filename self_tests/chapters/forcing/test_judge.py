"""Runs of forced routers: what is right passes, whoever tells its logits or not; what is wrong is told in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.chapters.forcing.judge.forced_routing import (
    judge_forced_groups,
    judge_forced_loads,
    judge_forced_weights,
    judge_straight_through,
)
from moe_conformance.chapters.forcing.workloads.hot import REFUSED
from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import (
    Mismatch,
    NotOffered,
    WrongForm,
    WrongGradient,
    WrongSelection,
    WrongWeight,
)
from moe_conformance.scenarios.outcome import Microbatch, Outcome
from moe_conformance.workloads.records.runs import RouterStep
from self_tests.judging import simulated_routers as simulated
from self_tests.judging.breaking import caught, judged, rerouted
from self_tests.judging.breaking_routers import GROUPED, edit_ranks
from self_tests.judging.simulated_routers import Formula, route_workload, simulate_routers

RANDOM = (("random", None),)
DEALT = (("round_robin", None),)


def drawn(like_TE: Tensor) -> Tensor:
    """What is forced: other logits for other numbers of tokens."""
    return torch.randn(like_TE.shape, generator=torch.Generator().manual_seed(len(like_TE))).to(like_TE)


class Through(torch.autograd.Function):
    """Forced logits forward, the same gradient backward."""

    @staticmethod
    def forward(ctx: Any, own_TE: Tensor) -> Tensor:
        """Return what is drawn."""
        return drawn(own_TE)

    @staticmethod
    def backward(ctx: Any, *dforced_TE: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return dforced_TE[0]


def forced_scores(logits_TE: Tensor, config: Config) -> Tensor:
    """Score the forced logits."""
    return simulated.scores(Through.apply(logits_TE), config)  # type: ignore[no-untyped-call]


def forced(formula: Formula, strategy: Any = RANDOM, tells: bool = True, **fields: Any) -> Outcome:
    """Run routers under a strategy on two ranks, which tell the logits in force or none."""
    work = route_workload(Layout(2, ep=2), microbatches=2, **{**GROUPED, "routing.forced": strategy, **fields})
    outcome = simulate_routers(replace(work, run=RouterStep(forced="routes")), formula)

    def tell(seen: Microbatch) -> Microbatch:
        assert seen.router.logits_TE is not None
        return rerouted(seen, logits_TE=drawn(seen.router.logits_TE) if tells else None)

    if strategy == DEALT:
        return outcome
    return edit_ranks(outcome, lambda rank: replace(rank, microbatches=tuple(map(tell, rank.microbatches))))


def dealt(scores_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """Deal the experts out in turn."""
    dealt = torch.arange(len(scores_TE) * config.top_k) % config.experts
    return dealt.reshape(-1, config.top_k)


def detected(kind: type[Mismatch], judge: Callable[..., None], outcome: Outcome) -> Mismatch:
    """Return what a judge complains of, which is of that kind."""
    error = caught(judge, outcome)
    assert isinstance(error, kind), error
    return error


RIGHT, DEALING = Formula(scores=forced_scores), Formula(choose=dealt)


class TestForcedLogits:
    @pytest.mark.parametrize(
        "fields", [{}, {"routing.groups": (4, 4), "routing.group_score": "max"}], ids=["limited", "all groups"]
    )
    @pytest.mark.parametrize("judge", [judge_forced_groups, judge_forced_weights, judge_straight_through])
    def test_what_is_right_passes(self, judge: Callable[..., None], fields: dict[str, Any]) -> None:
        """Every judge compares on both ranks, where groups limit and where all are open."""
        assert {0, 1} == judged(judge, forced(RIGHT, **fields)).ranks

    def test_groups_are_judged_without_logits_and_gradients_are_not(self) -> None:
        """Where the backend keeps forced logits to itself, how many groups a token uses still shows."""
        assert {0, 1} == judged(judge_forced_groups, forced(RIGHT, tells=False)).ranks
        with pytest.raises(NotOffered, match="does not report the forced logits"):
            judged(judge_straight_through, forced(RIGHT, tells=False))

    @pytest.mark.parametrize("tells", [True, False])
    def test_no_limit_is_found(self, tells: bool) -> None:
        """Experts of more groups than are opened."""
        wide = replace(RIGHT, choose=lambda scores_TE, _, config: scores_TE.topk(config.top_k, 1).indices)
        error = detected(WrongSelection, judge_forced_groups, forced(wide, tells=tells))
        assert "groups; expected at most 2; likely cause: logits were forced after the group limit" in error.sentence

    @pytest.mark.parametrize("tells", [True, False])
    def test_who_ignores_the_strategy_is_found(self, tells: bool) -> None:
        """The router's own choice is no forced one."""
        error = detected(WrongSelection, judge_forced_groups, forced(Formula(), tells=tells))
        assert "forced routing random was requested, accepted and ignored" in error.sentence

    def test_logits_that_are_no_numbers_are_refused(self) -> None:
        """What is told has to be logits."""
        none_TE = torch.full((3, 16), torch.nan)
        outcome = edit_ranks(
            forced(RIGHT),
            lambda rank: replace(
                rank,
                microbatches=tuple(rerouted(seen, logits_TE=none_TE) for seen in rank.microbatches),
            ),
        )
        assert (
            "the forced logits of rank 0 are not (24, 16) or not finite"
            in detected(WrongForm, judge_forced_groups, outcome).sentence
        )

    def test_weights_of_its_own_logits_are_found(self) -> None:
        """The forced choice may not weigh what the router would have scored it."""
        work = forced(RIGHT).workload
        router_ED = work.parameters["router", None]
        own = [[batch.x_TD @ router_ED.T for batch in of_ranks] for of_ranks in work.batches]

        def reweigh(seen: Microbatch, logits_TE: Tensor) -> Microbatch:
            assert seen.router.ids_TK is not None
            scores_TE = simulated.scores(logits_TE, work.config)
            return replace(
                seen,
                router=replace(seen.router, weights_TK=simulated.weigh(scores_TE, seen.router.ids_TK, work.config)),
            )

        outcome = edit_ranks(
            forced(RIGHT),
            lambda rank: replace(
                rank,
                microbatches=tuple(reweigh(seen, own[m][rank.rank]) for m, seen in enumerate(rank.microbatches)),
            ),
        )
        error = detected(WrongWeight, judge_forced_weights, outcome)
        assert "its experts by the router's own logits, not by the forced ones" in error.sentence

    def test_a_gradient_that_stops_is_found(self) -> None:
        """Zeros in place of what goes straight through."""
        stopped = replace(
            RIGHT, scores=lambda logits_TE, config: simulated.scores(drawn(logits_TE) + 0 * logits_TE, config)
        )
        error = detected(WrongGradient, judge_straight_through, forced(stopped))
        assert "no gradient passes through the forced logits" in error.sentence


class TestForcedIds:
    @pytest.mark.parametrize("judge", [judge_forced_groups, judge_forced_loads, judge_forced_weights])
    def test_what_is_right_passes(self, judge: Callable[..., None]) -> None:
        """Dealt experts are of all groups, and weigh their own scores."""
        assert {0, 1} == judged(judge, forced(DEALING, DEALT)).ranks

    def test_who_does_not_learn_is_found(self) -> None:
        """A router whose ids are forced gets the gradient of their weights, where gradients are finished."""
        stopped = replace(DEALING, finish=lambda _, gradients: torch.zeros_like(gradients[0]))
        error = detected(WrongGradient, judge_forced_weights, forced(stopped, DEALT))
        assert "router" in error.sentence

    def test_dealt_in_another_order_is_right_too(self) -> None:
        """Round robin is a rule of loads."""
        turned = Formula(choose=lambda *given: given[2].experts - 1 - dealt(*given).flip(0))
        assert {0, 1} == judged(judge_forced_groups, forced(turned, DEALT)).ranks

    def test_who_ignores_the_strategy_is_found(self) -> None:
        """Loads of the router's own choice are not even."""
        error = detected(WrongSelection, judge_forced_groups, forced(Formula(), DEALT))
        assert "forced routing round_robin was requested, accepted and ignored" in error.sentence

    def test_weights_of_others_are_found(self) -> None:
        """Forced experts weigh their own scores, not those of the experts whose place they take."""

        def weigh(scores_TE: Tensor, ids_TK: Tensor, config: Config) -> Tensor:
            bias_E = forced(DEALING, DEALT).workload.parameters["balance_bias", None]
            return simulated.weigh(scores_TE, simulated.choose(scores_TE, bias_E, config), config)

        error = detected(WrongWeight, judge_forced_weights, forced(replace(DEALING, weigh=weigh), DEALT))
        assert "the experts that the router would have selected without forcing" in error.sentence


@pytest.mark.parametrize("forced", [forced for kind in REFUSED.values() for forced in kind], ids=str)
def test_what_must_be_refused_is_two_strategies_or_lacks_a_parameter(forced: Any) -> None:
    """FORCE-17 allows to accept the same strategy with the same parameter twice, and every single complete one."""
    assert 2 == len(set(forced)) or forced[0] in (("biased", None), ("ratio", None))
