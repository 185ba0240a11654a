"""Experts that see every token, by hand: forward and backward, whole, sharded and fused.

y_t = sum_k w_tk f_{id_tk}(x_t) + a_t sum_j h_j(x_t),  h(x) = down (silu(gate x) * up x) + bias,
a_t = sigmoid(<v, x_t>), or 1 without a gate. With g_t = dL/dy_t and s_t = sum_j h_j(x_t):

    dL/dbias_j = sum_t a_t g_t          dL/da_t = <s_t, g_t>          dL/dv = sum_t a_t (1 - a_t) <s_t, g_t> x_t
    dL/dx_t    = routed part + sum_j (dh_j/dx)^T (a_t g_t) + a_t (1 - a_t) <s_t, g_t> v
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import layer
from .experts import SwiGLU, sigmoid, swiglu_row, swiglu_row_backward

Floats = NDArray[np.float64]


class Shared(NamedTuple):
    """A shared expert: its three matrices and, if it has one, its output bias (D,)."""

    matrices: SwiGLU
    bias_D: Floats | None = None

    def zeros(self) -> Shared:
        """Gradients of the same shapes, nothing summed yet."""
        return Shared(self.matrices.zeros(), None if self.bias_D is None else np.zeros(len(self.bias_D)))


class Gradients(NamedTuple):
    """What comes back: per rank y, dx and dweights; summed over ranks the routed, the shared and the gate."""

    y: list[Floats]
    dx: list[Floats]
    dweights: list[Floats]
    routed: list[SwiGLU]
    shared: list[Shared]
    gate_D: Floats | None


def answer(expert: Shared, x_D: Floats) -> Floats:
    """One expert's answer to one row, bias included."""
    h_D = swiglu_row(expert.matrices, x_D)
    if expert.bias_D is not None:
        for d in range(len(h_D)):
            h_D[d] += expert.bias_D[d]
    return h_D


def factor(x_D: Floats, v_D: Floats | None) -> float:
    """The gate of one token: between 0 and 1, or 1 where there is no gate."""
    return 1.0 if v_D is None else sigmoid(layer.inner(v_D, x_D))


def added(x_D: Floats, shared: Sequence[Shared], v_D: Floats | None) -> Floats:
    """What one token gets from all shared experts."""
    part_D = np.zeros(len(x_D))
    for expert in shared:
        part_D += factor(x_D, v_D) * answer(expert, x_D)
    return part_D


def forward(
    batch: Sequence[layer.Tokens],
    routed: Sequence[SwiGLU],
    shared: Sequence[Shared],
    v_D: Floats | None,
    applied: layer.Applied = "output",
) -> list[Floats]:
    """Output (T, D) of every rank: the routed part, plus the shared part of every single token."""
    outputs = layer.forward(batch, routed, applied)
    for y_TD, tokens in zip(outputs, batch, strict=True):
        for t in range(len(y_TD)):
            y_TD[t] += added(tokens.x_TD[t], shared, v_D)
    return outputs


def backward(
    batch: Sequence[layer.Tokens],
    routed: Sequence[SwiGLU],
    shared: Sequence[Shared],
    v_D: Floats | None,
    upstream: Sequence[Floats],
    applied: layer.Applied = "output",
    divisor: int = 1,
) -> Gradients:
    """Gradients by the formulas above; those of parameters summed over all ranks and divided at the end."""
    back = layer.backward(batch, routed, applied, upstream)
    d_shared = [expert.zeros() for expert in shared]
    dv_D = None if v_D is None else np.zeros(len(v_D))
    for rank, tokens in enumerate(batch):
        for t, x_D in enumerate(tokens.x_TD):
            a, g_D = factor(x_D, v_D), upstream[rank][t]
            for expert, total in zip(shared, d_shared, strict=True):
                dx_D, d_matrices = swiglu_row_backward(expert.matrices, x_D, a * g_D)
                back.dx[rank][t] += dx_D
                for matrix, part in zip(total.matrices, d_matrices, strict=True):
                    matrix += part
                for d in range(0 if total.bias_D is None else len(g_D)):
                    total.bias_D[d] += a * g_D[d]
                if v_D is not None and dv_D is not None:
                    slope = a * (1.0 - a) * layer.inner(answer(expert, x_D), g_D)
                    dv_D += slope * x_D
                    back.dx[rank][t] += slope * v_D
    averaged = [SwiGLU(*(matrix / divisor for matrix in expert)) for expert in back.experts]
    d_shared = [
        Shared(
            SwiGLU(*(matrix / divisor for matrix in expert.matrices)),
            None if expert.bias_D is None else expert.bias_D / divisor,
        )
        for expert in d_shared
    ]
    y = forward(batch, routed, shared, v_D, applied)
    return Gradients(y, back.dx, back.dweights, averaged, d_shared, None if dv_D is None else dv_D / divisor)


# ---- one expert in parts (SHARE-06, -08) -------------------------------------------------------------------


def hidden_units(expert: SwiGLU, units: Sequence[int]) -> SwiGLU:
    """The expert that has only these hidden units, in this order."""
    D = expert.gate_FD.shape[1]
    part = SwiGLU(np.zeros((len(units), D)), np.zeros((len(units), D)), np.zeros((D, len(units))))
    for i, f in enumerate(units):
        for d in range(D):
            part.gate_FD[i, d] = expert.gate_FD[f, d]
            part.up_FD[i, d] = expert.up_FD[f, d]
            part.down_DF[d, i] = expert.down_DF[d, f]
    return part


def shards(expert: Shared, rows: Sequence[Sequence[int]]) -> list[SwiGLU]:
    """The matrices of every tp rank; each hidden unit must be on one of them."""
    if sorted(f for units in rows for f in units) != list(range(len(expert.matrices.gate_FD))):
        raise ValueError(f"{rows} is no partition of {len(expert.matrices.gate_FD)} hidden units")
    return [hidden_units(expert.matrices, units) for units in rows]


def summed(x_TD: Floats, parts: Sequence[SwiGLU], bias_D: Floats | None) -> Floats:
    """Answers of all tp ranks, added up, and the bias once."""
    y_TD = np.zeros(x_TD.shape)
    for t in range(len(x_TD)):
        if bias_D is not None:
            y_TD[t] += bias_D
        for part in parts:
            y_TD[t] += swiglu_row(part, x_TD[t])
    return y_TD


def fused(experts: Sequence[Shared]) -> Shared:
    """One expert with the hidden units of all, expert after expert, and the sum of their biases."""
    if not experts:
        raise ValueError("nothing to fuse")
    units = [(expert.matrices, f) for expert in experts for f in range(len(expert.matrices.gate_FD))]
    D = experts[0].matrices.gate_FD.shape[1]
    wide = SwiGLU(np.zeros((len(units), D)), np.zeros((len(units), D)), np.zeros((D, len(units))))
    for i, (matrices, f) in enumerate(units):
        for d in range(D):
            wide.gate_FD[i, d] = matrices.gate_FD[f, d]
            wide.up_FD[i, d] = matrices.up_FD[f, d]
            wide.down_DF[d, i] = matrices.down_DF[d, f]
    biases = [expert.bias_D for expert in experts if expert.bias_D is not None]
    total = np.zeros(D)
    for bias_D in biases:
        total += bias_D
    return Shared(wide, total if biases else None)


def parts_of_fused(wide: Shared, sizes: Sequence[int]) -> list[Shared]:
    """Gradients of the parts in the gradient of the fused expert; each bias has the whole sum's gradient."""
    if sum(sizes) != len(wide.matrices.gate_FD) or any(size < 0 for size in sizes):
        raise ValueError(f"{sizes} do not add up to {len(wide.matrices.gate_FD)} hidden units")
    parts, first = [], 0
    for size in sizes:
        parts.append(Shared(hidden_units(wide.matrices, range(first, first + size)), wide.bias_D))
        first += size
    return parts
