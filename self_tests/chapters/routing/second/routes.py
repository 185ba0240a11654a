"""Routing by hand: which experts a token chooses, with which weights, and the gradient back to its logits.

T tokens, K slots per token, E experts. Float64; one token at a time; every gradient is a formula on paper:

    softmax        s_e = exp(l_e) / sum_j exp(l_j)              ds_i/dl_e = s_i ([i = e] - s_e)
    softmax_topk   the same over the K chosen logits alone      the same, zero for one that is not chosen
    sigmoid        s_e = 1 / (1 + exp(-l_e))                    ds_e/dl_e = s_e (1 - s_e)
    sqrtsoftplus   s_e = sqrt(log(1 + exp(l_e)))                ds_e/dl_e = sigmoid(l_e) / (2 s_e)
    normalise      w_k = s_k / S, S = sum_j s_j                 dw_k/ds_i = ([k = i] - s_k / S) / S
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"]
GroupRule = Literal["top2_sum", "max", "topk_sum"]


@dataclass(frozen=True)
class Limit:
    """Experts lie in `groups` equal contiguous groups, and a token may use only the `chosen` best of them.

    A group is worth: `top2_sum` the sum of its two largest choice values, `max` its largest one, `topk_sum`
    the sum of its K / chosen largest.
    """

    groups: int
    chosen: int
    rule: GroupRule


@dataclass(frozen=True)
class Gate:
    """How a router turns logits into K weighted experts."""

    slots: int
    kind: Kind = "softmax"
    bias: tuple[float, ...] | None = None
    limit: Limit | None = None
    normalise: bool = False
    scale: float = 1.0


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-l)), written so that exp never sees a positive argument."""
    if logit >= 0.0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))


def softmax(logits: list[float]) -> list[float]:
    """exp(l_e) over the sum of all; -inf counts nothing as long as one logit is finite."""
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def square_root_of_softplus(logit: float) -> float:
    """sqrt(log(1 + exp(l))), where log(1 + exp(l)) = max(l, 0) + log(1 + exp(-|l|))."""
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def slope_of_square_root_of_softplus(logit: float) -> float:
    """sigmoid(l) / (2 sqrt(softplus(l))), for l towards -inf as exp(l) / (2 exp(l / 2)), so to 0."""
    score = square_root_of_softplus(logit)
    return 0.0 if score == 0.0 else sigmoid(logit) / (2.0 * score)


def scores_of_token(kind: Kind, logits: list[float]) -> list[float]:
    """One score per expert; for softmax_topk, whose scores exist only after the choice, the logits."""
    if kind == "softmax":
        return softmax(logits)
    if kind == "softmax_topk":
        return list(logits)
    if kind == "sigmoid":
        return [sigmoid(logit) for logit in logits]
    return [square_root_of_softplus(logit) for logit in logits]


def largest_first(values: list[float], candidates: list[int], count: int) -> list[int]:
    """The `count` candidates with the largest values, descending; among equals the lowest id comes first."""
    left = sorted(candidates)
    taken: list[int] = []
    for _ in range(count):
        best = left[0]
        for candidate in left:
            if values[candidate] > values[best]:
                best = candidate
        taken.append(best)
        left.remove(best)
    return taken


def addends_of_group(limit: Limit, slots: int) -> int:
    """How many choice values the worth of a group adds up."""
    return {"top2_sum": 2, "max": 1, "topk_sum": slots // limit.chosen}[limit.rule]


def worths_of_groups(choice: list[float], limit: Limit, slots: int) -> list[float]:
    """What each group of experts is worth to this token under the limit's rule."""
    size = len(choice) // limit.groups
    worths = [0.0] * limit.groups
    for group in range(limit.groups):
        members = sorted(choice[group * size : (group + 1) * size], reverse=True)
        for value in members[: addends_of_group(limit, slots)]:
            worths[group] += value
    return worths


def permitted_experts(choice: list[float], gate: Gate) -> list[int]:
    """The experts of the chosen groups; all of them without a limit."""
    if gate.limit is None:
        return list(range(len(choice)))
    size = len(choice) // gate.limit.groups
    worths = worths_of_groups(choice, gate.limit, gate.slots)
    open_groups = largest_first(worths, list(range(gate.limit.groups)), gate.limit.chosen)
    return [expert for expert in range(len(choice)) if expert // size in open_groups]


def choice_values(logits: list[float], gate: Gate) -> list[float]:
    """What the choice goes by: score plus bias."""
    values = scores_of_token(gate.kind, logits)
    if gate.bias is not None:
        for expert in range(len(values)):
            values[expert] += gate.bias[expert]
    return values


def route_token(logits: list[float], gate: Gate) -> tuple[list[int], list[float]]:
    """The K experts of one token and their weights.

    The bias enters the choice of groups and of experts and nothing else; weights are the unbiased scores.
    """
    choice = choice_values(logits, gate)
    ids = largest_first(choice, permitted_experts(choice, gate), gate.slots)
    return ids, weights_of_chosen(logits, ids, gate)


def weights_of_chosen(logits: list[float], ids: list[int], gate: Gate) -> list[float]:
    """Weights of one token for experts already chosen: unbiased scores, normalised if asked, then scaled.

    Scores that are all zero cannot be normalised and stay zero.
    """
    weights = unscaled_scores_of_chosen(logits, ids, gate)
    total = math.fsum(weights)
    if gate.normalise and total > 0.0:
        weights = [weight / total for weight in weights]
    return [gate.scale * weight for weight in weights]


def unscaled_scores_of_chosen(logits: list[float], ids: list[int], gate: Gate) -> list[float]:
    """Unbiased scores at the chosen ids."""
    if gate.kind == "softmax_topk":
        return softmax([logits[expert] for expert in ids])
    scores = scores_of_token(gate.kind, logits)
    return [scores[expert] for expert in ids]


def gradient_of_token(logits: list[float], ids: list[int], gate: Gate, upstream: list[float]) -> list[float]:
    """Gradient of sum_k upstream_k w_k with respect to the E logits of one token, the choice held fixed."""
    scores = unscaled_scores_of_chosen(logits, ids, gate)
    d_scores = [gate.scale * gradient for gradient in upstream]
    total = math.fsum(scores)
    if gate.normalise and total > 0.0:
        mean = math.fsum(d * (score / total) for d, score in zip(d_scores, scores, strict=True))
        d_scores = [(d - mean) / total for d in d_scores]

    d_logits = [0.0] * len(logits)
    if gate.kind == "softmax":
        everything = softmax(logits)
        mean = math.fsum(d * score for d, score in zip(d_scores, scores, strict=True))
        for expert in range(len(logits)):
            d_logits[expert] -= everything[expert] * mean
        for expert, d, score in zip(ids, d_scores, scores, strict=True):
            d_logits[expert] += score * d
    elif gate.kind == "softmax_topk":
        mean = math.fsum(d * score for d, score in zip(d_scores, scores, strict=True))
        for expert, d, score in zip(ids, d_scores, scores, strict=True):
            d_logits[expert] += score * (d - mean)
    elif gate.kind == "sigmoid":
        for expert, d, score in zip(ids, d_scores, scores, strict=True):
            d_logits[expert] += d * score * (1.0 - score)
    else:
        for expert, d in zip(ids, d_scores, strict=True):
            d_logits[expert] += d * slope_of_square_root_of_softplus(logits[expert])
    return d_logits


def route(logits_TE: Floats, gate: Gate) -> tuple[Ints, Floats]:
    """Route every token by itself: ids (T, K) in descending order of choice value, and weights (T, K)."""
    T = logits_TE.shape[0]
    ids_TK = np.zeros((T, gate.slots), dtype=np.int64)
    weights_TK = np.zeros((T, gate.slots), dtype=np.float64)
    for token in range(T):
        ids, weights = route_token([float(logit) for logit in logits_TE[token]], gate)
        ids_TK[token] = ids
        weights_TK[token] = weights
    return ids_TK, weights_TK


def gradient(logits_TE: Floats, ids_TK: Ints, gate: Gate, upstream_TK: Floats) -> Floats:
    """Gradient of the weights, weighed by `upstream_TK`, with respect to the logits (T, E)."""
    d_logits_TE = np.zeros(logits_TE.shape, dtype=np.float64)
    for token in range(logits_TE.shape[0]):
        d_logits_TE[token] = gradient_of_token(
            [float(logit) for logit in logits_TE[token]],
            [int(expert) for expert in ids_TK[token]],
            gate,
            [float(value) for value in upstream_TK[token]],
        )
    return d_logits_TE


def margin_of_token(choice: list[float], ids: list[int], limit: Limit | None) -> float:
    """How clearly one selection wins: try every set of groups it may come from and keep the best reading.

    A reading is as good as the lesser of two gaps: between the worst chosen and the best other permitted
    expert, and between the worst chosen and the best other group, the latter divided by the values that a
    group adds up.
    """
    groups, chosen = (1, 1) if limit is None else (limit.groups, limit.chosen)
    size = len(choice) // groups
    best = -math.inf
    for open_groups in combinations(range(groups), chosen):
        if any(expert // size not in open_groups for expert in ids):
            continue
        others = [e for e in range(len(choice)) if e // size in open_groups and e not in ids]
        gap = gap_between([choice[e] for e in ids], [choice[e] for e in others])
        if limit is not None:
            worths = worths_of_groups(choice, limit, len(ids))
            closed = [worths[group] for group in range(groups) if group not in open_groups]
            group_gap = gap_between([worths[group] for group in open_groups], closed)
            gap = min(gap, group_gap / addends_of_group(limit, len(ids)))
        best = max(best, gap)
    return best


def gap_between(chosen: list[float], others: list[float]) -> float:
    """The smallest of the chosen minus the largest of the others; infinite where there are no others."""
    return min(chosen) - max(others) if others else math.inf
