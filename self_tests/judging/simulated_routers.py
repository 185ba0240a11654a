"""A perfect router on every rank in one process, in the tokens' dtype or a wider one: makes outcomes for tests.

With places to break it: each step of the formula may be replaced. Shares nothing with the oracles or with native.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome, RankOutcome, RouterSeen
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import ParameterKey, Workload

Weigh = Callable[[Tensor, Tensor, Config], Tensor]  # (scores (T, E), ids (T, K)) -> weights (T, K)
Choose = Callable[[Tensor, Tensor, Config], Tensor]  # (scores (T, E), bias (E,)) -> ids (T, K)
Finish = Callable[[int, list[Tensor]], Tensor]  # (rank, gradient of every rank) -> the rank's finished one


def route_workload(
    layout: Layout | None = None, tokens: int = 24, microbatches: int = 1, series: str = "route", **fields: Any
) -> Workload:
    """Draw a workload for routers, on two ranks if nothing else is said; T differs between ranks."""
    layout, config = layout or Layout(2, ep=2), Config().changed(fields)
    batches = tuple(
        tuple(
            draw.route_batch(tokens - rank - m, config, draw.generator(series, layout.name, m, rank), 1.0)
            for rank in range(layout.world)
        )
        for m in range(microbatches)
    )
    schedule = " ".join(f"F{m} B{m}" for m in range(microbatches))
    generator = draw.generator(series, layout.name, "router")
    parameters = draw.router_parameters(config, generator, bias=-0.9, twins=False)
    return Workload("simulated", RouterStep(), config, layout, batches, schedule, parameters)


def scores(logits_TE: Tensor, config: Config) -> Tensor:
    """Score every expert; for softmax_topk by the logit."""
    if config.routing.score == "softmax":
        return logits_TE.softmax(1)
    if config.routing.score == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).sqrt() if config.routing.score == "sqrtsoftplus" else logits_TE


def choose(scores_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """Take the K highest scores plus bias, from the best groups if there are groups."""
    choice_TE = scores_TE.detach() + bias_E.to(scores_TE.dtype)
    if config.routing.groups is not None:
        G, chosen = config.routing.groups
        addends = {"max": 1, "top2_sum": 2, "topk_sum": config.top_k // chosen}[config.routing.group_score]
        choice_TGe = choice_TE.unflatten(1, (G, -1))
        best_Tg = choice_TGe.topk(addends, 2).values.sum(2).topk(chosen, 1).indices
        open_TG = torch.zeros(len(choice_TE), G, dtype=torch.bool).scatter(1, best_Tg, True)
        choice_TE = choice_TGe.masked_fill(~open_TG[:, :, None], -torch.inf).flatten(1)
    return choice_TE.topk(config.top_k, 1).indices


def weigh(scores_TE: Tensor, ids_TK: Tensor, config: Config) -> Tensor:
    """Weigh the chosen by their scores."""
    weights_TK = scores_TE.gather(1, ids_TK)
    if config.routing.score == "softmax_topk":
        weights_TK = weights_TK.softmax(1)
    if config.routing.normalise:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    return weights_TK * config.routing.scale


def summed(rank: int, gradients: list[Tensor]) -> Tensor:
    """Add up the gradients of all ranks one by one, in their dtype."""
    return sum(gradients[1:], gradients[0])


@dataclass(frozen=True)
class Formula:
    """How routers compute, and what is broken: by default nothing is."""

    wide: bool = False  # in float32 at least, or in the tokens' dtype
    scores: Callable[[Tensor, Config], Tensor] = scores
    choose: Choose = choose
    weigh: Weigh = weigh
    finish: Finish = summed


def simulate_routers(workload: Workload, formula: Formula | None = None) -> Outcome:
    """Run the workload and return what ranks would bring back, gradients finished."""
    formula, ranks = formula or Formula(), range(workload.layout.world)
    router = workload.parameters["router", None]
    leaves = [router.clone().requires_grad_() for _ in ranks]
    microbatches = [
        tuple(_step(workload, formula, leaves[rank], m, rank) for m in range(len(workload.batches))) for rank in ranks
    ]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    key: ParameterKey = ("router", None)
    outcomes = tuple(
        RankOutcome(
            rank=rank,
            status="ok",
            microbatches=microbatches[rank],
            grads_local={key: Grad(gradients[rank])},
            grads_final={key: Grad(formula.finish(rank, gradients))},
        )
        for rank in ranks
    )
    return Outcome("simulated", workload, outcomes, 0.0)


def _step(workload: Workload, formula: Formula, router_ED: Tensor, m: int, rank: int) -> Microbatch:
    batch, config = workload.batches[m][rank], workload.config
    dtype = torch.promote_types(config.dtype, torch.float32) if formula.wide else config.dtype
    x = batch.x_TD.clone().requires_grad_()
    logits_TE = F.linear(x.to(dtype), router_ED.to(dtype))
    scores_TE = formula.scores(logits_TE, config)
    bias_E = workload.parameters.get(("balance_bias", None), torch.zeros(config.experts))
    ids_TK = formula.choose(scores_TE, bias_E, config)
    weights_TK = formula.weigh(scores_TE, ids_TK, config)
    weights_TK.backward(batch.upstream.gather(1, ids_TK).to(weights_TK.dtype))
    return Microbatch(
        y=None,
        y_shape=tuple(weights_TK.shape),
        y_dtype=weights_TK.dtype,
        dx_TD=Grad(x.grad),
        dweights_TK=Grad(None),
        router=RouterSeen(
            ids_TK,
            weights_TK.detach(),
            logits_TE.detach(),
            torch.bincount(ids_TK.flatten(), minlength=config.experts),
        ),
    )
