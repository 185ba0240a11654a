"""Words for wrong weights and gradients of routers: the wrong rule of weighing, the factor or the missing tokens.

A rule is another formula on purpose: without normalisation, scaled twice, with the bias. The first that explains all
tokens within their bounds is told; its derivative explains wrong gradients in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, factor, too_narrow, within
from moe_conformance.judging.findings import Finding, ratio_names, ratio_words
from moe_conformance.judging.observed.scopes import Place, other_sums
from moe_conformance.judging.router.expected import RouterExpected, Weigh
from moe_conformance.reference.routing import routes

Found = tuple[list[Finding], float | None]  # and the factor if there is one for all
Tensors = Mapping[Place, Tensor]
Targets = Mapping[Place, Target]

_SCORES: Mapping[routes.Score, str] = {
    "softmax": "softmax over all experts",
    "softmax_topk": "softmax over the chosen experts",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "the square root of softplus",
}


# ---- rules ---------------------------------------------------------------------------------------------------


def other_rules(expected: RouterExpected) -> Iterator[tuple[str, Weigh]]:
    """List wrong ways to weigh the chosen, each differentiable in the logits; who `{they}` are is left open."""
    how, bias_E = expected.weighing, expected.bias_E
    scale = how["scale"]

    def by(**changed: Any) -> Weigh:
        return lambda logits_TE, ids_TK: routes.weights(logits_TE, ids_TK, **{**how, **changed})

    yield (
        ("{they} were not normalised" if how["normalise"] else "{they} were normalised"),
        by(normalise=not how["normalise"]),
    )
    if scale != 1:
        yield "{they} were not scaled", by(scale=1.0)
        yield "{they} were scaled twice", by(scale=scale**2)
        yield "{they} were neither normalised nor scaled", by(normalise=False, scale=1.0)
    yield "{they} were divided by the sum over all experts", _sum_over_all(expected)
    if bias_E is not None:
        yield "the bias leaked into {them}", _with_bias(expected)
        yield "the bias was added to the logits", lambda logits_TE, ids_TK: expected.weigh(logits_TE + bias_E, ids_TK)
    for score in get_args(routes.Score):
        if score != how["score"]:
            yield f"{{their}} scores were {_SCORES[score]}", by(score=score)
    yield "{they} were the softmax of the scores over all experts", _softmax_of_scores(expected)
    yield "{they} were the raw logits", lambda logits_TE, ids_TK: logits_TE.gather(1, ids_TK)
    yield "{they} were the scaled raw logits", lambda logits_TE, ids_TK: scale * logits_TE.gather(1, ids_TK)
    yield "{they} all were 1", lambda logits_TE, ids_TK: 0 * logits_TE.gather(1, ids_TK) + 1


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
    """Return the right rule, with no gradient through the sum that normalises."""

    def weigh(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        plain_TK = routes.weights(logits_TE, ids_TK, score=expected.weighing["score"])
        return plain_TK / plain_TK.detach().sum(1, keepdim=True) * expected.weighing["scale"]

    return weigh


# ---- explanations --------------------------------------------------------------------------------------------


def explain_weights(expected: RouterExpected, actual: Tensors, targets: Targets) -> Found:
    """Say why weights are wrong: the rule that explains all of them, one factor, or each token by itself."""

    def weights(weigh: Weigh, place: Place) -> Tensor:
        return weigh(expected.logits(place), expected.ids[place])

    rules = ((words.format(they="they", them="them", their="their"), weigh) for words, weigh in other_rules(expected))
    return _explain(expected, "the weights", actual, targets, _names(expected), rules, weights)


def explain_router_dx(expected: RouterExpected, actual: Tensors, targets: Targets, names: Mapping[str, float]) -> Found:
    """Say why dx is wrong: the rule that was differentiated, one factor, or each token by itself."""

    def dx(weigh: Weigh, place: Place) -> Tensor:
        return expected.solve([place], weigh)[0]

    names = {**_names(expected), **names}
    return _explain(expected, "dx", actual, targets, names, _differentiable(expected), dx)


def _explain(
    expected: RouterExpected,
    what: str,
    actual: Tensors,
    targets: Targets,
    names: Mapping[str, float],
    rules: Iterator[tuple[str, Weigh]],
    outcome: Callable[[Weigh, Place], Tensor],
) -> Found:
    be = "is" if what == "dx" else "are"
    tokens = _wrong_tokens(what, actual, targets)
    ranks = tuple(sorted({rank for finding in tokens for rank in finding.ranks}))
    example = max(tokens, key=lambda finding: finding.size).sentence
    for words, weigh in rules:
        if all(_near(actual[at], outcome(weigh, at), targets[at]) for at in actual):
            return [Finding("cause", f"{what} {be} as if {words}; for example {example}", ranks)], None
    joined = _joined(actual, targets)
    ratio = factor(*joined, names)
    if ratio is not None:
        sentence = f"every element of {what} is {ratio_words(ratio, names)}"
        return [Finding("factor", sentence, ranks, abs(ratio - 1))], ratio
    if all(_near(actual[at].sort(1).values, targets[at].expected.sort(1).values, targets[at]) for at in actual):
        return [Finding("order", f"{what} of a token lie at other slots than its experts; {example}", ranks)], None
    narrow = too_narrow(joined[0], Target(*joined[1:]), expected.workload.config.dtype)
    if narrow:
        return [Finding("cause", f"{what} {be} as if {narrow}; for example {example}", ranks)], None
    return tokens, None


def explain_router_gradient(
    expected: RouterExpected,
    stage: int,
    actual: Mapping[int, Tensor],
    targets: Mapping[int, Target],
    names: Mapping[str, float],
) -> Found:
    """Say why the router's gradient is wrong on ranks of a stage: one factor for all, or for each what is in it."""
    names = {**ratio_names({"the scale": expected.workload.config.scale}), **names}
    ratio = factor(*_joined(actual, targets), names)
    if ratio is not None:
        sentence = f"every element of the router's gradient is {ratio_words(ratio, names)}"
        return [Finding("factor", sentence, tuple(actual), abs(ratio - 1))], ratio
    findings = []
    for rank, value in actual.items():
        worst = compare(value, *targets[rank])
        if not worst.holds:
            said = _mistake(expected, stage, rank, value, targets[rank], names)
            sentence = f"the router's gradient on rank {rank} has {worst}"
            findings.append(
                Finding(said or "outside", f"{said}: {sentence}" if said else sentence, (rank,), worst.size)
            )
    return findings, None


def _mistake(
    expected: RouterExpected, stage: int, rank: int, value: Tensor, target: Target, names: Mapping[str, float]
) -> str | None:
    if not bool(torch.isfinite(value).all()):
        return "the gradient is not finite"
    if not bool(value.any()):
        return "the gradient is zero"
    ratio = factor(value, *target, names)
    if ratio is not None:
        return f"the gradient is {ratio_words(ratio, names)}"
    if value.shape != expected.router_ED.shape:
        return None  # a part of the router, for which nothing else is tried
    for words, places in other_sums(expected.workload, rank):
        partial = expected.solve(places)[1] / expected.divisor
        if within(value, partial, target.allowed):
            return words
        ratio = factor(value, partial, target.allowed, names)
        if ratio is not None:
            return f"{words}, and it is {ratio_words(ratio, names)} of that"
    for words, weigh in _differentiable(expected):
        if _near(value, expected.solve(expected.stage_places(stage), weigh)[1] / expected.divisor, target):
            return f"the gradient is as if {words}"
    narrow = too_narrow(value, target, expected.workload.config.dtype)
    return f"the gradient is as if {narrow}" if narrow else None


def _differentiable(expected: RouterExpected) -> Iterator[tuple[str, Weigh]]:
    if expected.weighing["normalise"]:
        yield "no gradient went through the sum that the weights are divided by", _sum_detached(expected)
    for words, weigh in other_rules(expected):
        yield words.format(they="the weights", them="the weights", their="the weights'"), weigh


# ---- shared --------------------------------------------------------------------------------------------------


def _names(expected: RouterExpected) -> dict[str, float]:
    config = expected.workload.config
    return ratio_names({"the scale": config.scale, "K": config.top_k})


def _near(actual: Tensor, guess: Tensor, target: Target) -> bool:
    """Whether a guess explains what came back; it may be larger than the target, so it gets the largest bound."""
    return not actual.numel() or within(actual, guess, torch.full_like(guess, float(target.allowed.max())))


def _joined(actual: Mapping[Any, Tensor], targets: Mapping[Any, Target]) -> tuple[Tensor, Tensor, Tensor]:
    """Put actual, expected and allowed of all places or ranks into one vector each."""
    return (
        torch.cat([value.double().flatten() for value in actual.values()]),
        torch.cat([targets[at].expected.flatten() for at in actual]),
        torch.cat([targets[at].allowed.flatten() for at in actual]),
    )


def _wrong_tokens(what: str, actual: Tensors, targets: Targets) -> list[Finding]:
    """Tell every token that is out of its bounds."""
    findings = []
    for (m, rank), rows in actual.items():
        expected, allowed = targets[m, rank]
        for t, row in enumerate(rows):
            worst = compare(row, expected[t], allowed[t])
            if not worst.holds:
                of = f" of microbatch {m}" if m else ""
                findings.append(
                    Finding("outside", f"{what} of rank {rank} token {t}{of}: {worst}", (rank,), worst.size)
                )
    return findings
