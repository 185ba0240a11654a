"""The routed layer by hand, over all ranks at once, forward and backward.

Weights after the expert:  y_t = sum_k w_tk f_e(x_t), e = ids_tk
Weights before it:         y_t = sum_k f_e(w_tk x_t)

An id of -1 adds nothing, and its weight gets no gradient. Parameter gradients sum over all ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.experts.second import SwiGLU, swiglu_row, swiglu_row_backward

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Applied = Literal["output", "input"]


class Tokens(NamedTuple):
    """What one rank feeds: rows (T, D), expert ids (T, K) with -1 for an empty slot, weights (T, K)."""

    x_TD: Floats
    ids_TK: Ints
    weights_TK: Floats


class Gradients(NamedTuple):
    """What comes back: per rank dx (T, D) and dweights (T, K); per expert its summed parameter gradients."""

    dx: list[Floats]
    dweights: list[Floats]
    experts: list[SwiGLU]


def forward(batch: Sequence[Tokens], experts: Sequence[SwiGLU], applied: Applied) -> list[Floats]:
    """Output (T, D) of every rank."""
    outputs = []
    for x_TD, ids_TK, weights_TK in batch:
        y_TD = np.zeros(x_TD.shape, dtype=np.float64)
        for t in range(ids_TK.shape[0]):
            for k in range(ids_TK.shape[1]):
                if ids_TK[t, k] < 0:
                    continue
                expert, weight = experts[ids_TK[t, k]], weights_TK[t, k]
                if applied == "output":
                    y_TD[t] += weight * swiglu_row(expert, x_TD[t])
                else:
                    y_TD[t] += swiglu_row(expert, weight * x_TD[t])
        outputs.append(y_TD)
    return outputs


def backward(
    batch: Sequence[Tokens], experts: Sequence[SwiGLU], applied: Applied, upstream: Sequence[Floats]
) -> Gradients:
    """Gradients of sum over ranks, t, d of upstream * y.

    After the expert, with g the upstream row: the expert is handed w g, so dx += J^T (w g) and dw = g . f(x).
    Before the expert, with z = w x: the expert is handed g at z; dz = J(z)^T g, dx += w dz and dw = x . dz.
    """
    dx = [np.zeros(tokens.x_TD.shape, dtype=np.float64) for tokens in batch]
    dweights = [np.zeros(tokens.weights_TK.shape, dtype=np.float64) for tokens in batch]
    d_experts = [expert.zeros() for expert in experts]
    for rank, (x_TD, ids_TK, weights_TK) in enumerate(batch):
        for t in range(ids_TK.shape[0]):
            g_D = upstream[rank][t]
            for k in range(ids_TK.shape[1]):
                e, weight = int(ids_TK[t, k]), float(weights_TK[t, k])
                if e < 0:
                    continue
                if applied == "output":
                    dx_D, d_expert = swiglu_row_backward(experts[e], x_TD[t], weight * g_D)
                    dw = inner(g_D, swiglu_row(experts[e], x_TD[t]))
                else:
                    dz_D, d_expert = swiglu_row_backward(experts[e], weight * x_TD[t], g_D)
                    dx_D = weight * dz_D
                    dw = inner(x_TD[t], dz_D)
                dx[rank][t] += dx_D
                dweights[rank][t, k] = dw
                for total, part in zip(d_experts[e], d_expert, strict=True):
                    total += part
    return Gradients(dx, dweights, d_experts)


def inner(a_D: Floats, b_D: Floats) -> float:
    """Sum of the products of two rows."""
    total = 0.0
    for a, b in zip(a_D, b_D, strict=True):
        total += float(a) * float(b)
    return total
