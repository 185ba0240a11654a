"""Losses of a router by hand, with their gradients back to the logits, one token at a time.

T tokens, V of them valid, K slots, E experts. n_e choices of expert e, f_e = n_e / (K V), P_e the mean of p_te:

    balance loss   L = c E sum_e f_e P_e      dL/dl_te = (c E / V) sum_i f_i dp_ti/dl_te, f being constant
    shares         p_e = s_e / S              dp_i/dl_e = (s'_e / S) ([i = e] - p_i), S = sum_e s_e
                   softmax: s = exp(l), s' = s; sigmoid: s = 1 / (1 + exp(-l)), s' = s (1 - s);
                   sqrtsoftplus: s = sqrt(log(1 + exp(l))), s' = sigmoid(l) / (2 s)
    z-loss         L = (c / V) sum_t Z_t^2    dL/dl_te = (2 c / V) Z_t exp(l_te - Z_t), Z_t = log sum_e exp(l_te)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.routing.second.routes import (
    Gate,
    Kind,
    Limit,
    choice_values,
    largest_first,
    permitted_experts,
    sigmoid,
    slope_of_square_root_of_softplus,
    square_root_of_softplus,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NOTHING = 1e-100  # a sum of scores below this is none; the spec is free from 1e-12 on


class Tokens(NamedTuple):
    """Logits (T, E), chosen ids (T, K) with -1 for an empty slot, and True for every token that is padding."""

    logits_TE: Floats
    ids_TK: Ints
    padding_T: Bools | None = None


class Loss(NamedTuple):
    """A loss and its gradient with respect to the logits (T, E)."""

    value: float
    gradient_TE: Floats


class Share(NamedTuple):
    """Of one token: every expert's share of the scores, and s'_e / S, the slope of its own score in that unit."""

    share_E: list[float]
    slope_E: list[float]


def valid_tokens(T: int, padding_T: Bools | None) -> list[int]:
    """The tokens that the mask does not call padding."""
    if padding_T is None:
        return list(range(T))
    if padding_T.dtype != np.bool_ or padding_T.shape != (T,):
        raise ValueError(f"mask of type {padding_T.dtype} and shape {padding_T.shape} for {T} tokens")
    return [t for t in range(T) if not padding_T[t]]


def numbers(logits_E: Floats) -> list[float]:
    """One token's logits: finite, or -inf for a masked expert."""
    logits = [float(logit) for logit in logits_E]
    for logit in logits:
        if math.isnan(logit) or logit == math.inf:
            raise ValueError(f"a logit is {logit}")
    return logits


def powers(logits: list[float]) -> tuple[float, list[float]]:
    """The largest logit, and exp of all logits less it, which can overflow nowhere."""
    top = max(logits)
    if top == -math.inf:
        raise ValueError("all logits of a token are -inf")
    return top, [math.exp(logit - top) for logit in logits]


def share_of_token(kind: Kind, logits: list[float]) -> Share:
    """Scores divided by their sum over all experts; all zero where the sum has underflowed."""
    if kind in ("softmax", "softmax_topk"):
        scores = slopes = powers(logits)[1]
    elif kind == "sigmoid":
        scores = [sigmoid(logit) for logit in logits]
        slopes = [sigmoid(logit) * sigmoid(-logit) for logit in logits]  # 1 - s(l) = s(-l)
    else:
        scores = [square_root_of_softplus(logit) for logit in logits]
        slopes = [slope_of_square_root_of_softplus(logit) for logit in logits]
    total = math.fsum(scores)
    if total < NOTHING:
        return Share([0.0] * len(logits), [0.0] * len(logits))
    return Share([score / total for score in scores], [slope / total for slope in slopes])


def shares(kind: Kind, logits_TE: Floats) -> Floats:
    """Shares of all tokens (T, E)."""
    result_TE = np.zeros(logits_TE.shape, dtype=np.float64)
    for t in range(logits_TE.shape[0]):
        result_TE[t] = share_of_token(kind, numbers(logits_TE[t])).share_E
    return result_TE


def own_choices(
    kind: Kind, logits_TE: Floats, slots: int, limit: Limit | None = None, padding_T: Bools | None = None
) -> Ints:
    """The K largest shares of every token (T, K), best first; a limit leaves the groups a router would open.

    Padding chooses nothing: -1.
    """
    T, E = logits_TE.shape
    possible = E if limit is None else limit.chosen * (E // limit.groups)
    if not 1 <= slots <= possible:
        raise ValueError(f"{slots} slots for {possible} experts to choose from")
    ids_TK = np.full((T, slots), -1, dtype=np.int64)
    gate = Gate(slots, kind, limit=limit)
    for t in valid_tokens(T, padding_T):
        logits = numbers(logits_TE[t])
        permitted = permitted_experts(choice_values(logits, gate), gate)
        ids_TK[t] = largest_first(share_of_token(kind, logits).share_E, permitted, slots)
    return ids_TK


def count_choices(ids_TK: Ints, experts: int, padding_T: Bools | None = None) -> list[int]:
    """How often valid tokens chose each expert; -1 is no choice."""
    if ids_TK.dtype != np.int64 or ids_TK.shape[1] == 0:
        raise ValueError(f"ids of type {ids_TK.dtype} and shape {ids_TK.shape}")
    counts = [0] * experts
    for t in valid_tokens(ids_TK.shape[0], padding_T):
        for expert in ids_TK[t].tolist():
            if not -1 <= expert < experts:
                raise ValueError(f"token {t} chose expert {expert} of {experts}")
            if expert >= 0:
                counts[expert] += 1
    return counts


def balance(parts: Sequence[Tokens], fraction_E: list[float], kind: Kind, c: float) -> tuple[float, list[Floats]]:
    """Sum c E f_e P_e for given fractions, P over the valid tokens of all parts; with the gradient of each."""
    gradients = [np.zeros(part.logits_TE.shape, dtype=np.float64) for part in parts]
    places = [(i, t) for i, part in enumerate(parts) for t in valid_tokens(len(part.logits_TE), part.padding_T)]
    value = 0.0
    for i, t in places:
        share_E, slope_E = share_of_token(kind, numbers(parts[i].logits_TE[t]))
        factor = c * len(share_E) / len(places)
        mean = math.fsum(f * share for f, share in zip(fraction_E, share_E, strict=True))
        value += factor * mean
        for e, slope in enumerate(slope_E):
            gradients[i][t, e] = factor * slope * (fraction_E[e] - mean)
    return value, gradients


def fractions(counts: list[int], choices: int) -> list[float]:
    """Counts over the number of choices that were to be made; of no choices, zeros."""
    return [n / choices if choices else 0.0 for n in counts]


def count_tokens(tokens: Tokens) -> tuple[list[int], int]:
    """Choices of each expert, and valid tokens."""
    T, E = tokens.logits_TE.shape
    if len(tokens.ids_TK) != T:
        raise ValueError(f"ids of {len(tokens.ids_TK)} tokens for logits of {T}")
    return count_choices(tokens.ids_TK, E, tokens.padding_T), len(valid_tokens(T, tokens.padding_T))


def auxiliary(tokens: Tokens, kind: Kind, c: float) -> Loss:
    """The balance loss of one microbatch."""
    counts, V = count_tokens(tokens)
    value, (gradient_TE,) = balance([tokens], fractions(counts, V * tokens.ids_TK.shape[1]), kind, c)
    return Loss(value, gradient_TE)


def by_sequence(tokens: Tokens, sequences_T: Ints, kind: Kind, c: float, divisor: int | None = None) -> Loss:
    """The mean of the sequences' own balance losses; all but one sequence are padding in each of them.

    S is the number of sequences with a valid token, or the divisor, which may count empty ones too.
    """
    T = len(tokens.logits_TE)
    if sequences_T.dtype != np.int64 or sequences_T.shape != (T,):
        raise ValueError(f"sequences of type {sequences_T.dtype} and shape {sequences_T.shape} for {T} tokens")
    valid = valid_tokens(T, tokens.padding_T)
    labels = {int(sequences_T[t]) for t in valid}
    S = len(labels) if divisor is None else divisor
    if S < len(labels):
        raise ValueError(f"{len(labels)} sequences divided by {S}")
    auxiliary(tokens, kind, c)  # refuses what has no loss even where nothing is valid
    value, gradient_TE = 0.0, np.zeros(tokens.logits_TE.shape, dtype=np.float64)
    for label in sorted(labels):
        others_T = np.array([t not in valid or int(sequences_T[t]) != label for t in range(T)])
        alone = auxiliary(tokens._replace(padding_T=others_T), kind, c)
        value += alone.value / S
        gradient_TE += alone.gradient_TE / S
    return Loss(value, gradient_TE)


def over_a_step(
    step: Sequence[Sequence[Tokens]], kind: Kind, c: float, *, remembers: bool = True
) -> list[tuple[float, list[Floats]]]:
    """The global losses of one step, microbatch by microbatch, each with the gradients of its dp groups."""
    if not step:
        return []
    shapes = {(part.logits_TE.shape[1], part.ids_TK.shape[1]) for row in step for part in row}
    if len(shapes) != 1 or len({len(row) for row in step}) != 1:
        raise ValueError(f"parts of {shapes} experts and slots, {[len(row) for row in step]} of them")
    ((E, K),) = shapes
    counts, V = [0] * E, 0
    losses = []
    for row in step:
        if not remembers:
            counts, V = [0] * E, 0
        for part in row:
            more, tokens = count_tokens(part)
            counts, V = [n + m for n, m in zip(counts, more, strict=True)], V + tokens
        losses.append(balance(row, fractions(counts, K * V), kind, c))
    return losses


def z(logits_TE: Floats, c: float, padding_T: Bools | None = None) -> Loss:
    """The z-loss: c times the mean over valid tokens of Z squared."""
    valid = valid_tokens(len(logits_TE), padding_T)
    value, gradient_TE = 0.0, np.zeros(logits_TE.shape, dtype=np.float64)
    for t in valid:
        top, power_E = powers(numbers(logits_TE[t]))
        Z = top + math.log(math.fsum(power_E))
        value += c * Z * Z / len(valid)
        for e, power in enumerate(power_E):
            gradient_TE[t, e] = 2.0 * c * Z / len(valid) * (power / math.fsum(power_E))
    return Loss(value, gradient_TE)


def z_of_parts(parts: Sequence[tuple[Floats, Bools | None]], c: float) -> tuple[float, list[Floats]]:
    """The mean over ranks of their own z-losses; a rank without valid tokens counts as one of 0."""
    if not parts:
        raise ValueError("no rank")
    losses = [z(logits_TE, c, padding_T) for logits_TE, padding_T in parts]
    return (
        math.fsum(loss.value for loss in losses) / len(parts),
        [loss.gradient_TE / len(parts) for loss in losses],
    )
