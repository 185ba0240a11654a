"""What a router may answer to logits that are huge, masked, NaN or infinite, by hand, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.routing.second.routes import Gate, Kind, scores_of_token, unscaled_scores_of_chosen

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
MASKED = -math.inf


def is_bad(logits: Sequence[float]) -> bool:
    """A token that has a logit of NaN or +inf."""
    return any(math.isnan(logit) or logit == math.inf for logit in logits)


def bad_tokens(logits_TE: Floats) -> Bools:
    """Which tokens are bad."""
    return np.array([is_bad([float(logit) for logit in row]) for row in logits_TE], dtype=np.bool_)


def tokens_of(logits_TE: Floats, ids_TK: Ints) -> list[tuple[list[float], list[int]]]:
    """Logits and ids of every token."""
    if logits_TE.shape[0] != ids_TK.shape[0] or not 1 <= ids_TK.shape[1] <= logits_TE.shape[1]:
        raise ValueError(f"logits {logits_TE.shape}, ids {ids_TK.shape}")
    tokens = []
    for t in range(logits_TE.shape[0]):
        logits = [float(logit) for logit in logits_TE[t]]
        if is_bad(logits):
            raise ValueError(f"token {t} has logits {logits}")
        tokens.append((logits, [int(expert) for expert in ids_TK[t]]))
    return tokens


def different_in_range(ids: Sequence[int], experts: int) -> bool:
    """Each id a different one of the experts."""
    return all(0 <= expert < experts and ids.count(expert) == 1 for expert in ids)


def legal_ids(
    logits_TE: Floats,
    ids_TK: Ints,
    *,
    score: Kind,
    bias_E: Floats | None = None,
    among_TE: Bools | None = None,
    error: float = 2.0**-126,
) -> Bools:
    """Whether a token's experts are K different ones, none of them masked where a better one is left.

    Left is an expert that may be chosen (among those of the chosen groups), is not masked, and is not chosen.
    """
    if not error >= 0.0 or (among_TE is not None and among_TE.shape != logits_TE.shape):
        raise ValueError(f"error {error}, or experts to choose among of another shape than {logits_TE.shape}")
    E = logits_TE.shape[1]
    legal = []
    for t, (logits, ids) in enumerate(tokens_of(logits_TE, ids_TK)):
        if not different_in_range(ids, E):
            legal.append(False)
            continue
        if logits == [MASKED] * E:
            legal.append(True)
            continue
        values = scores_of_token(score, logits)
        for e in range(E):
            if bias_E is not None:
                values[e] += float(bias_E[e])
        worse = [
            (chosen, left)
            for chosen in ids
            for left in range(E)
            if logits[chosen] == MASKED
            and logits[left] != MASKED
            and (among_TE is None or among_TE[t, left])
            and left not in ids
            and values[left] - values[chosen] > 2.0 * error
        ]
        legal.append(not worse)
    return np.array(legal, dtype=np.bool_)


def legal_weights(
    logits_TE: Floats,
    ids_TK: Ints,
    weights_TK: Floats,
    *,
    score: Kind,
    normalise: bool = False,
    scale: float = 1.0,
    rounding: float = 2.0**-20,
) -> Bools:
    """Whether a token's weights are numbers, none for a masked expert, that add up as they should."""
    if weights_TK.shape != ids_TK.shape or not scale > 0.0:
        raise ValueError(f"ids {ids_TK.shape}, weights {weights_TK.shape}, scale {scale}")
    legal = []
    for t, (logits, ids) in enumerate(tokens_of(logits_TE, ids_TK)):
        if not different_in_range(ids, len(logits)):
            raise ValueError(f"token {t} has ids {ids}")
        weights = [float(weight) for weight in weights_TK[t]]
        legal.append(fit(logits, ids, weights, Gate(len(ids), score, None, None, normalise, scale), rounding))
    return np.array(legal, dtype=np.bool_)


def fit(logits: list[float], ids: list[int], weights: list[float], gate: Gate, rounding: float) -> bool:
    """Whether these are weights of these experts of one token."""
    if not all(math.isfinite(weight) for weight in weights):
        return False
    masked = [k for k, expert in enumerate(ids) if logits[expert] == MASKED]
    if len(masked) == len(ids):
        return True
    if any(weights[k] != 0.0 for k in masked):
        return False
    if not gate.normalise and gate.kind != "softmax_topk":
        return True
    total, scale = sum((Fraction(weight) for weight in weights), Fraction(0)), Fraction(gate.scale)
    if math.fsum(unscaled_scores_of_chosen(logits, ids, gate)) > 1e-12:
        return abs(total - scale) <= Fraction(rounding) * scale
    return 0 <= total <= scale * (1 + Fraction(rounding))


def finite_gradients(dlogits_TE: Floats) -> Bools:
    """Which tokens have nothing but numbers for a gradient."""
    return np.array([all(math.isfinite(d) for d in row) for row in dlogits_TE.tolist()], dtype=np.bool_)


def legal_ids_beside_bad(ids_TK: Ints, experts: int) -> Bools:
    """Whether a token's ids are experts, each once, or empty slots."""
    legal = []
    for ids in ids_TK.tolist():
        legal.append(different_in_range([expert for expert in ids if expert != -1], experts))
    return np.array(legal, dtype=np.bool_)


def unmoved(
    logits_TE: Floats,
    ids_TK: Ints,
    weights_TK: Floats,
    without_ids_GK: Ints,
    without_weights_GK: Floats,
    *,
    rounding: float = 2.0**-20,
) -> Bools:
    """Whether each good token has the experts and weights that it has among good tokens alone."""
    bad = bad_tokens(logits_TE)
    good = [t for t in range(len(bad)) if not bad[t]]
    K = ids_TK.shape[1]
    shapes = [ids_TK.shape, weights_TK.shape, without_ids_GK.shape, without_weights_GK.shape]
    if shapes != [(len(bad), K)] * 2 + [(len(good), K)] * 2:
        raise ValueError(f"logits {logits_TE.shape} with {len(good)} good tokens: {shapes}")
    legal = np.ones(len(bad), dtype=np.bool_)
    for g, t in enumerate(good):
        now = sorted(zip(ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True))
        before = sorted(zip(without_ids_GK[g].tolist(), without_weights_GK[g].tolist(), strict=True))
        for (expert, weight), (other, expected) in zip(now, before, strict=True):
            if expert != other or not abs(weight - expected) <= rounding * abs(expected):
                legal[t] = False
    return legal
