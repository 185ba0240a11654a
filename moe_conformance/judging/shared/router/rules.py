"""Mistakes of routers: wrong rules by which scores become weights, in words and as functions.

Examples are weights without normalisation, scaled twice, or with the bias. The derivative of a rule explains wrong
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from moe_conformance.judging.explain.bounded import Candidate, Found
from moe_conformance.judging.explain.bounded_gradients import Oracle
from moe_conformance.judging.explain.bounded_tokens import Targets, Tensors, explain_tokens
from moe_conformance.judging.findings import ratio_names
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.expected import RouterExpected, Weigh
from moe_conformance.reference.routing import routes
from moe_conformance.workloads.records.workload import ParameterKey

_SCORES: Mapping[routes.Score, str] = {
    "softmax": "softmax over all experts",
    "softmax_topk": "softmax over the selected experts",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "the square root of softplus",
}


# ---- rules ---------------------------------------------------------------------------------------------------


def other_rules(expected: RouterExpected) -> Iterator[tuple[str, Weigh]]:
    """Yield wrong rules for the weights of the selected experts, each differentiable in the logits."""
    how, bias_E = expected.weighing, expected.bias_E
    scale = how["scale"]

    def by(**changed: Any) -> Weigh:
        return lambda logits_TE, ids_TK: routes.weights(logits_TE, ids_TK, **{**how, **changed})

    yield f"the weights were {'not ' if how['normalise'] else ''}normalised", by(normalise=not how["normalise"])
    if scale != 1:
        yield "the weights were not scaled", by(scale=1.0)
        yield "the weights were scaled twice", by(scale=scale**2)
        yield "the weights were neither normalised nor scaled", by(normalise=False, scale=1.0)
    yield "the weights were divided by the sum over all experts", _sum_over_all(expected)
    if bias_E is not None:
        yield "the weights included the expert bias", _with_bias(expected)
        yield (
            "the expert bias was added to the logits",
            lambda logits_TE, ids_TK: expected.weigh(logits_TE + bias_E, ids_TK),
        )
    for score in get_args(routes.Score):
        if score != how["score"]:
            yield f"the scores were {_SCORES[score]}", by(score=score)
    yield "the weights were the softmax of the scores over all experts", _softmax_of_scores(expected)
    yield "the weights were the raw logits", lambda logits_TE, ids_TK: logits_TE.gather(1, ids_TK)
    yield "the weights were the scaled raw logits", lambda logits_TE, ids_TK: scale * logits_TE.gather(1, ids_TK)
    yield "all weights were 1", lambda logits_TE, ids_TK: 0 * logits_TE.gather(1, ids_TK) + 1


def _sum_over_all(expected: RouterExpected) -> Weigh:
    def weigh(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        scores_TE = routes.scores(logits_TE, expected.weighing["score"])
        shares_TE = scores_TE / scores_TE.sum(1, keepdim=True)
        return shares_TE.gather(1, ids_TK) * expected.weighing["scale"]

    return weigh


def _softmax_of_scores(expected: RouterExpected) -> Weigh:
    def weigh(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        scores_TE = routes.scores(logits_TE, expected.weighing["score"])
        return scores_TE.softmax(1).gather(1, ids_TK) * expected.weighing["scale"]

    return weigh


def _with_bias(expected: RouterExpected) -> Weigh:
    def weigh(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        scores_TE = routes.selection_scores(logits_TE, score=expected.weighing["score"], bias_E=expected.bias_E)
        weights_TK = scores_TE.gather(1, ids_TK)
        if expected.weighing["normalise"]:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        return weights_TK * expected.weighing["scale"]

    return weigh


def _sum_detached(expected: RouterExpected) -> Weigh:
    """Return the right rule, without a gradient through the sum that normalises."""

    def weigh(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        plain_TK = routes.weights(logits_TE, ids_TK, score=expected.weighing["score"])
        return plain_TK / plain_TK.detach().sum(1, keepdim=True) * expected.weighing["scale"]

    return weigh


# ---- explanations --------------------------------------------------------------------------------------------


def explain_weights(expected: RouterExpected, actual: Tensors, targets: Targets) -> Found:
    """Return findings that explain wrong weights: see `bounded_tokens`."""

    def candidates(places: Sequence[Place]) -> Iterator[Candidate]:
        logits_TE, ids_TK = (torch.cat([of(at) for at in places]) for of in (expected.logits, expected.ids.__getitem__))
        for words, weigh in other_rules(expected):
            yield words, weigh(logits_TE, ids_TK)
        given_TK, right_TK = (torch.cat([of[at] for at in places]) for of in (actual, rights))
        order_TK = given_TK.argsort(1)
        in_order_TK = torch.zeros_like(right_TK).scatter(1, order_TK, right_TK.sort(1).values)
        yield "the weights of a token were in other slots than its experts", in_order_TK

    rights = {at: target.expected for at, target in targets.items()}
    return explain_tokens("the weights", actual, targets, candidates, names=_names(expected), dtype=expected.dtype)


def explain_router_dx(expected: RouterExpected, actual: Tensors, targets: Targets, names: Mapping[str, float]) -> Found:
    """Return findings that explain a wrong dx: see `bounded_tokens`."""

    def candidates(places: Sequence[Place]) -> Iterator[Candidate]:
        return ((words, expected.solve(places, weigh)[0][:, :D]) for words, weigh in _differentiable(expected))

    D = expected.workload.config.hidden
    names = {**_names(expected), **names}
    return explain_tokens("dx", actual, targets, candidates, names=names, dtype=expected.workload.config.dtype)


def gradients_of(expected: RouterExpected, key: ParameterKey) -> Oracle:
    """Return the `Oracle` of a router parameter's gradients over some tokens, and with mistakes."""

    def solved(places: Sequence[Place], weigh: Weigh | None = None) -> dict[ParameterKey, Tensor]:
        return {key: expected.part(expected.solve(places, weigh)[1], key)}

    return Oracle(
        expected.workload,
        expected.divisor,
        solved,
        lambda places: ((words, solved(places, weigh)) for words, weigh in _differentiable(expected)),
    )


def _differentiable(expected: RouterExpected) -> Iterator[tuple[str, Weigh]]:
    if expected.weighing["normalise"]:
        yield "the sum of the normalisation was treated as a constant", _sum_detached(expected)
    yield from other_rules(expected)


def _names(expected: RouterExpected) -> dict[str, float]:
    config = expected.workload.config
    return ratio_names({"the scale": config.routing.scale, "K": config.top_k})
