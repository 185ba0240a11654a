"""Combine with biases, by hand, and the routing that is left when ranks have failed.

    y_t = sum_b bias_bt + sum_k w_tk a_tk over slots that hold an expert
    dbias_bt = g_t,  da_tk = w_tk g_t,  dw_tk = <a_tk, g_t>, all 0 at an empty slot

What an empty slot is told reaches nothing, NaN included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def check_shapes(answers_TKD: Floats, ids_TK: Ints, weights_TK: Floats, biases: Sequence[Floats]) -> None:
    """One answer for every slot, one bias row for every token."""
    T, K, D = answers_TKD.shape
    if ids_TK.shape != (T, K) or weights_TK.shape != (T, K) or any(bias.shape != (T, D) for bias in biases):
        shapes = [bias.shape for bias in biases]
        raise ValueError(f"answers {answers_TKD.shape}, ids {ids_TK.shape}, weights {weights_TK.shape}, {shapes}")


def combine(answers_TKD: Floats, ids_TK: Ints, weights_TK: Floats, biases: Sequence[Floats] = ()) -> Floats:
    """Output (T, D)."""
    check_shapes(answers_TKD, ids_TK, weights_TK, biases)
    T, K, D = answers_TKD.shape
    y_TD = np.zeros((T, D), dtype=np.float64)
    for t in range(T):
        for d in range(D):
            for k in range(K):
                if ids_TK[t, k] >= 0:
                    y_TD[t, d] += weights_TK[t, k] * answers_TKD[t, k, d]
            for bias_TD in biases:
                y_TD[t, d] += bias_TD[t, d]
    return y_TD


def combine_backward(
    answers_TKD: Floats, ids_TK: Ints, weights_TK: Floats, biases: Sequence[Floats], g_TD: Floats
) -> tuple[Floats, Floats, list[Floats]]:
    """Gradients of answers, of weights and of every bias."""
    T, K, D = answers_TKD.shape
    d_answers_TKD, d_weights_TK = np.zeros((T, K, D)), np.zeros((T, K))
    for t in range(T):
        for k in range(K):
            if ids_TK[t, k] < 0:
                continue
            for d in range(D):
                d_answers_TKD[t, k, d] = weights_TK[t, k] * g_TD[t, d]
                d_weights_TK[t, k] += answers_TKD[t, k, d] * g_TD[t, d]
    return d_answers_TKD, d_weights_TK, [g_TD.copy() for _ in biases]


def without_ranks(ids_TK: Ints, owners_E: Sequence[Sequence[int]], failed: Collection[int]) -> Ints:
    """The routing with empty slots for every expert that misses a shard."""
    if any(len(owners) == 0 for owners in owners_E):
        raise ValueError(f"an expert is held by nobody: {owners_E}")
    left_TK = np.full(ids_TK.shape, -1, dtype=np.int64)
    for t, k in np.ndindex(*ids_TK.shape):
        expert = int(ids_TK[t, k])
        if not -1 <= expert < len(owners_E):
            raise ValueError(f"expert {expert} of {len(owners_E)}")
        if expert >= 0 and not any(owner in failed for owner in owners_E[expert]):
            left_TK[t, k] = expert
    return left_TK
