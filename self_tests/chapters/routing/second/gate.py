"""The gate of a router by hand: its logits l_te = sum_d x_td W_ed + c_e, and its parameters in a new model.

dx_td = sum_e g_te W_ed,  dW_ed = sum_t g_te x_td,  dc_e = sum_t g_te.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def logits(x_TD: Floats, weight_ED: Floats, bias_E: Floats) -> Floats:
    """Logits (T, E)."""
    (T, D), E = x_TD.shape, len(weight_ED)
    found = np.zeros((T, E), dtype=np.float64)
    for t in range(T):
        for e in range(E):
            found[t, e] = bias_E[e]
            for d in range(D):
                found[t, e] += x_TD[t, d] * weight_ED[e, d]
    return found


def gradients(x_TD: Floats, weight_ED: Floats, upstream_TE: Floats) -> tuple[Floats, Floats, Floats]:
    """Gradients of x (T, D), of the weight (E, D) and of the bias (E,)."""
    (T, D), E = x_TD.shape, len(weight_ED)
    dx_TD, dweight_ED, dbias_E = np.zeros((T, D)), np.zeros((E, D)), np.zeros(E)
    for t in range(T):
        for e in range(E):
            dbias_E[e] += upstream_TE[t, e]
            for d in range(D):
                dx_TD[t, d] += upstream_TE[t, e] * weight_ED[e, d]
                dweight_ED[e, d] += upstream_TE[t, e] * x_TD[t, d]
    return dx_TD, dweight_ED, dbias_E


def usable(value: NDArray[np.float32], *, by_expert: bool) -> str:
    """What is wrong with a parameter, or nothing."""
    for number in value.reshape(-1).tolist():
        if math.isnan(number) or math.isinf(number):
            return "is not finite"
    if not by_expert or len(value) < 2:
        return ""
    for row in value[1:]:
        for number, first in zip(row.tolist(), value[0].tolist(), strict=True):
            if number != first:
                return ""
    return "is the same for all experts"


def differing(replicas: Mapping[int, NDArray[np.float32]]) -> list[int]:
    """Ranks whose bytes are others than those of the lowest rank."""
    ranks = sorted(replicas)
    found = []
    for rank in ranks[1:]:
        one, first = replicas[rank], replicas[ranks[0]]
        if one.shape != first.shape or one.dtype != first.dtype or one.tobytes() != first.tobytes():
            found.append(rank)
    return found
