"""Words for wrong routers: which token, which experts and scores, and the mistake that explains all that is wrong.

A guess is another rule on purpose: without the bias, without normalisation, groups scored by their best expert. The
first that explains all tokens within their bounds is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from moe_conformance.judging.bounded import Target, compare, factor, within
from moe_conformance.judging.diagnosis import Finding, ratio_names, ratio_words
from moe_conformance.judging.places import Place, other_sums
from moe_conformance.judging.router_expected import Limit, RouterExpected
from reference import routing, selection

Found = tuple[list[Finding], float | None]  # and the factor if there is one for all


# ---- selection -----------------------------------------------------------------------------------------------


def explain_selection(expected: RouterExpected, illegal: Mapping[Place, Sequence[int]]) -> list[Finding]:
    """Say for every illegal choice who was chosen and who should have been; and by which rule all was chosen."""
    cause = next((words for words, legal in _other_choices(expected) if legal), None)
    findings = [
        Finding("choice", *_choice(expected, place, token)) for place, tokens in illegal.items() for token in tokens
    ]
    if cause is None:
        return findings
    ranks = tuple(sorted({place[1] for place, tokens in illegal.items() if tokens}))
    example = max(findings, key=lambda finding: finding.size).sentence
    wrong = f"{len(findings)} of {sum(map(len, expected.ids.values()))} tokens are wrong"
    return [Finding("cause", f"all experts are as if {cause}; {wrong}, for example {example}", ranks)]


def _choice(expected: RouterExpected, place: Place, token: int) -> tuple[str, tuple[int, ...], float]:
    """Tell one choice, and by how much it misses."""
    scores_E = expected.selection_scores(place, expected.bias_E)[token]
    chosen, right = sorted(expected.ids[place][token].tolist()), sorted(expected.choice(place)[token].tolist())

    def scored(ids: Sequence[int]) -> str:
        return ", ".join(f"{e} ({float(scores_E[e]):.4g})" for e in ids)

    margin = float(selection.margins(scores_E[None], expected.ids[place][token][None], **expected.limit))
    doubt = float(expected.doubt(place)[token])
    sentence = (
        f"rank {place[1]} token {token} chose {scored([e for e in chosen if e not in right] or chosen)} instead of "
        f"{scored([e for e in right if e not in chosen] or right)} (margin {margin:.3g}, rounding allows {-doubt:.2g})"
    )
    return sentence, (place[1],), min(-margin, 1e300)


def _other_choices(expected: RouterExpected) -> Iterator[tuple[str, bool]]:
    """Hold all choices against one wrong rule after the other."""

    def legal(by: str, limit: Limit | None = None) -> bool:
        return all(bool(expected.legal(at, _other_scores(expected, at, by), limit).all()) for at in expected.places)

    if expected.bias_E is not None:
        yield "chosen without the bias", legal("no bias")
        yield "chosen with the bias added to the logits", legal("biased logits")
        yield "chosen with the bias subtracted", legal("negative bias")
    yield "chosen by the lowest scores", legal("lowest")
    groups = expected.limit["groups"]
    if groups is None:
        return
    everything: Limit = {"groups": None, "group_score": "max"}
    yield "chosen from all groups", legal("right", everything)
    yield "chosen with the experts of closed groups at 0 instead of -inf", legal("closed at 0", everything)
    if expected.bias_E is not None:
        yield "chosen from groups that were scored without the bias", legal("unbiased groups", everything)
    for other in get_args(routing.GroupScore):
        if other != expected.limit["group_score"] and _possible(expected, other):
            yield (
                f"chosen from groups that were scored by {other}",
                legal("right", {"groups": groups, "group_score": other}),
            )


def _possible(expected: RouterExpected, group_score: routing.GroupScore) -> bool:
    """Whether groups are large enough to be scored that way."""
    config = expected.workload.config
    assert config.groups is not None  # asked only where there are groups
    addends = {"max": 1, "top2_sum": 2, "topk_sum": config.top_k // config.groups[1]}[group_score]
    return 1 <= addends <= config.experts // config.groups[0]


def _other_scores(expected: RouterExpected, place: Place, by: str) -> Tensor:
    """Return selection scores (T, E) under a wrong rule."""
    right_TE = expected.selection_scores(place, expected.bias_E)
    plain_TE = expected.selection_scores(place, None)
    if by in ("closed at 0", "unbiased groups"):
        scored_TE = plain_TE if by == "unbiased groups" else right_TE
        config = expected.workload.config
        assert config.groups is not None
        open_TE = selection.group_mask(scored_TE, config.groups, top_k=config.top_k, group_score=config.group_score)
        return torch.where(open_TE, right_TE, 0.0 if by == "closed at 0" else -torch.inf)
    if by == "biased logits":
        assert expected.bias_E is not None
        return routing.scores(expected.logits(place) + expected.bias_E.double(), expected.weighing["score"])
    return {"no bias": plain_TE, "negative bias": 2 * plain_TE - right_TE, "lowest": -right_TE, "right": right_TE}[by]


# ---- weights -------------------------------------------------------------------------------------------------


def explain_weights(expected: RouterExpected, actual: Mapping[Place, Tensor], targets: Mapping[Place, Target]) -> Found:
    """Say why weights are wrong: the rule that explains all of them, one factor, or each token by itself."""
    config = expected.workload.config
    names = ratio_names({"K": config.top_k, "the scale": config.scale})
    tokens = _wrong_rows("the weights", actual, targets)
    ranks = tuple(sorted({rank for finding in tokens for rank in finding.ranks}))
    example = max(tokens, key=lambda finding: finding.size).sentence
    for words, weights in _other_weights(expected):
        if all(_near(actual[at], weights[at], targets[at]) for at in actual):
            return [Finding("cause", f"the weights are as if {words}; for example {example}", ranks)], None
    ratio = factor(*_joined(actual, targets), names)
    if ratio is not None:
        return [Finding("factor", f"every weight is {ratio_words(ratio, names)}", ranks, abs(ratio - 1))], ratio
    if all(_near(actual[at].sort(1).values, targets[at].expected.sort(1).values, targets[at]) for at in actual):
        return [Finding("order", f"the weights of a token lie at other slots than its experts; {example}", ranks)], None
    return tokens, None


def _near(actual: Tensor, guess: Tensor, target: Target) -> bool:
    """Whether a guess explains what came back; it may be larger than the target, so it gets the largest bound."""
    return not actual.numel() or within(actual, guess, torch.full_like(guess, float(target.allowed.max())))


def _other_weights(expected: RouterExpected) -> Iterator[tuple[str, Mapping[Place, Tensor]]]:
    """Weigh the same choice by one wrong rule after the other."""
    right, scale = expected.weighing, expected.weighing["scale"]

    def by(shift_E: Tensor | None = None, **changed: Any) -> Mapping[Place, Tensor]:
        how = {**right, **changed}
        return {
            at: routing.weights(_shifted(expected.logits(at), shift_E), expected.ids[at], **how)
            for at in expected.places
        }

    if right["normalise"]:
        yield "they were not normalised", by(normalise=False)
    else:
        yield "they were normalised", by(normalise=True)
    if scale != 1:
        yield "they were not scaled", by(scale=1.0)
        yield "they were scaled twice", by(scale=scale**2)
        if right["normalise"]:
            yield "they were neither normalised nor scaled", by(normalise=False, scale=1.0)
    if expected.bias_E is not None:
        yield "the bias leaked into them", {at: _biased(expected, at) for at in expected.places}
        yield "the bias was added to the logits", by(shift_E=expected.bias_E)
    for score in get_args(routing.Score):
        if score != right["score"]:
            yield f"their score were {_SCORES[score]}", by(score=score)
    yield "they were the raw logits", {at: expected.logits(at).gather(1, expected.ids[at]) for at in expected.places}
    yield "all were 1", {at: torch.ones_like(ids, dtype=torch.float64) for at, ids in expected.ids.items()}


_SCORES = {
    "softmax": "softmax over all experts",
    "softmax_topk": "softmax over the chosen experts",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "the square root of softplus",
}


def _shifted(logits_TE: Tensor, shift_E: Tensor | None) -> Tensor:
    return logits_TE if shift_E is None else logits_TE + shift_E.double()


def _biased(expected: RouterExpected, place: Place) -> Tensor:
    """Weigh by selection scores, bias included."""
    weights_TK = expected.selection_scores(place, expected.bias_E).gather(1, expected.ids[place])
    if expected.weighing["normalise"]:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    return weights_TK * expected.weighing["scale"]


# ---- gradients -----------------------------------------------------------------------------------------------


def explain_gradients(
    expected: RouterExpected,
    actual: Mapping[Place, Tensor],
    targets: Mapping[Place, Target],
    names: Mapping[str, float],
) -> Found:
    """Say why the tokens' gradients are wrong: one factor, a path that is cut, or each token by itself."""
    tokens = _wrong_rows("dx", actual, targets)
    ranks = tuple(sorted({rank for finding in tokens for rank in finding.ranks}))
    config = expected.workload.config
    names = {**names, **ratio_names({"K": config.top_k, "the scale": config.scale})}
    ratio = factor(*_joined(actual, targets), names)
    if ratio is not None:
        return [Finding("factor", f"every element of dx is {ratio_words(ratio, names)}", ranks, abs(ratio - 1))], ratio
    example = max(tokens, key=lambda finding: finding.size).sentence
    if config.normalise and all(_near(actual[at], _sum_detached(expected, at), targets[at]) for at in actual):
        words = "dx is as if no gradient went through the sum that the weights are divided by"
        return [Finding("cause", f"{words}; for example {example}", ranks)], None
    return tokens, None


def _sum_detached(expected: RouterExpected, place: Place) -> Tensor:
    """Differentiate the weights with their sum held fixed, (T, D)."""
    how = expected.weighing
    logits_TE = expected.logits(place).requires_grad_()
    plain_TK = routing.weights(logits_TE, expected.ids[place], score=how["score"], scale=how["scale"])
    fixed_T1 = plain_TK.detach().sum(1, keepdim=True) / how["scale"]
    (dlogits_TE,) = torch.autograd.grad(plain_TK / fixed_T1, logits_TE, expected.upstream(place).double())
    return dlogits_TE @ expected.router_ED.double()


def explain_router_gradient(
    expected: RouterExpected,
    stage: int,
    actual: Mapping[int, Tensor],
    targets: Mapping[int, Target],
    names: Mapping[str, float],
) -> Found:
    """Say why the router's gradient is wrong on the ranks of a stage: one factor, or the tokens that are in it."""
    config = expected.workload.config
    names = {**names, **ratio_names({"K": config.top_k, "the scale": config.scale})}
    ratio = factor(*_joined(actual, targets), names)
    if ratio is not None:
        sentence = f"every element of the router's gradient is {ratio_words(ratio, names)}"
        return [Finding("factor", sentence, tuple(actual), abs(ratio - 1))], ratio
    findings = []
    for rank, value in actual.items():
        worst = compare(value, *targets[rank])
        if not worst.holds:
            said = _mistake(expected, rank, value, targets[rank], names)
            sentence = f"the router's gradient on rank {rank} has {worst}"
            findings.append(
                Finding(said or "outside", f"{said}: {sentence}" if said else sentence, (rank,), worst.size)
            )
    return findings, None


def _mistake(
    expected: RouterExpected, rank: int, value: Tensor, target: Target, names: Mapping[str, float]
) -> str | None:
    if not bool(torch.isfinite(value).all()):
        return "the gradient is not finite"
    if not bool(value.any()):
        return "the gradient is zero"
    ratio = factor(value, *target, names)
    if ratio is not None:
        return f"the gradient is {ratio_words(ratio, names)}"
    for words, places in other_sums(expected.workload, rank):
        partial = expected.solve(places)[1] / expected.divisor
        if partial.shape != value.shape:
            return None  # a part of the router: which is seen by its target alone
        if within(value, partial, target.allowed):
            return words
        ratio = factor(value, partial, target.allowed, names)
        if ratio is not None:
            return f"{words}, and it is {ratio_words(ratio, names)} of that"
    return None


# ---- shared --------------------------------------------------------------------------------------------------


def _joined(actual: Mapping[Any, Tensor], targets: Mapping[Any, Target]) -> tuple[Tensor, Tensor, Tensor]:
    """Put actual, expected and allowed of all places or ranks into one vector each."""
    return (
        torch.cat([value.double().flatten() for value in actual.values()]),
        torch.cat([targets[at].expected.flatten() for at in actual]),
        torch.cat([targets[at].allowed.flatten() for at in actual]),
    )


def _wrong_rows(name: str, actual: Mapping[Place, Tensor], targets: Mapping[Place, Target]) -> list[Finding]:
    """Tell every token that is out of its bounds."""
    findings = []
    for (m, rank), rows in actual.items():
        expected, allowed = targets[m, rank]
        for t, row in enumerate(rows):
            worst = compare(row, expected[t], allowed[t])
            if not worst.holds:
                of = f" of microbatch {m}" if m else ""
                findings.append(
                    Finding("outside", f"{name} of rank {rank} token {t}{of}: {worst}", (rank,), worst.size)
                )
    return findings
