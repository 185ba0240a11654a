"""Routing by hand: which experts a token chooses, with which weights, and the gradient back to its logits.

T tokens, K slots per token, E experts. Float64 throughout; one token at a time; every gradient is a formula on paper:

    softmax        s_e = exp(l_e) / sum_j exp(l_j)              ds_i/dl_e = s_i ([i = e] - s_e)
    softmax_topk   the same over the K chosen logits alone      the same, zero for an expert that is not chosen
    sigmoid        s_e = 1 / (1 + exp(-l_e))                    ds_e/dl_e = s_e (1 - s_e)
    sqrtsoftplus   s_e = sqrt(log(1 + exp(l_e)))                ds_e/dl_e = sigmoid(l_e) / (2 s_e)
    normalise      w_k = s_k / S, S = sum_j s_j                 dw_k/ds_i = [k = i] / S - s_k / S^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"]
GroupRule = Literal["top2", "max", "top_share"]


@dataclass(frozen=True)
class Limit:
    """Experts lie in `groups` equal contiguous groups, and a token may use only the `chosen` best of them.

    A group is worth: `top2` the sum of its two largest choice values, `max` its largest one, `top_share` the sum of
    its K / chosen largest.
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
    """sigmoid(l) / (2 sqrt(softplus(l))); towards -inf both behave as powers of exp(l) and the quotient tends to 0."""
    score = square_root_of_softplus(logit)
    return 0.0 if score == 0.0 else sigmoid(logit) / (2.0 * score)


def scores_of_token(kind: Kind, logits: list[float]) -> list[float]:
    """One score per expert; for softmax_topk, whose scores exist only after the choice, the logits themselves."""
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


def worth_of_group(members: list[float], gate: Gate, limit: Limit) -> float:
    """What one group of experts is worth to this token under the limit's rule."""
    addends = {"top2": 2, "max": 1, "top_share": gate.slots // limit.chosen}[limit.rule]
    worth = 0.0
    for value in sorted(members, reverse=True)[:addends]:
        worth += value
    return worth


def permitted_experts(choice: list[float], gate: Gate) -> list[int]:
    """The experts of the chosen groups; all of them without a limit."""
    if gate.limit is None:
        return list(range(len(choice)))
    size = len(choice) // gate.limit.groups
    worths = [
        worth_of_group(choice[group * size : (group + 1) * size], gate, gate.limit)
        for group in range(gate.limit.groups)
    ]
    open_groups = largest_first(worths, list(range(gate.limit.groups)), gate.limit.chosen)
    return [expert for expert in range(len(choice)) if expert // size in open_groups]


def route_token(logits: list[float], gate: Gate) -> tuple[list[int], list[float]]:
    """The K experts of one token and their weights.

    The bias enters the choice (of groups and of experts) and nothing else; the weights are the unbiased scores.
    """
    scores = scores_of_token(gate.kind, logits)
    choice = list(scores)
    if gate.bias is not None:
        for expert in range(len(choice)):
            choice[expert] += gate.bias[expert]
    ids = largest_first(choice, permitted_experts(choice, gate), gate.slots)
    return ids, weights_of_chosen(logits, ids, gate)


def weights_of_chosen(logits: list[float], ids: list[int], gate: Gate) -> list[float]:
    """Weights of one token for experts already chosen: unbiased scores, normalised if asked, then scaled."""
    weights = unscaled_scores_of_chosen(logits, ids, gate)
    if gate.normalise:
        total = math.fsum(weights)
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
    if gate.normalise:
        total = math.fsum(scores)
        pulled = math.fsum(d * score for d, score in zip(d_scores, scores, strict=True))
        d_scores = [d / total - pulled / total**2 for d in d_scores]

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
