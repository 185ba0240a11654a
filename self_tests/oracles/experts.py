"""One expert by hand, forward and backward, one row and one number at a time.

SwiGLU of a row x (D): a_f = sum_d gate[f, d] x_d, u_f = sum_d up[f, d] x_d, h_f = silu(a_f) u_f,
y_d = sum_f down[d, f] h_f, with silu(a) = a sigmoid(a). D hidden, F expert hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class SwiGLU(NamedTuple):
    """The three matrices of an expert: gate and up (F, D), down (D, F); also the shape of their gradients."""

    gate_FD: Floats
    up_FD: Floats
    down_DF: Floats

    def zeros(self) -> SwiGLU:
        """Gradients of the same shapes, nothing summed yet."""
        return SwiGLU(*(np.zeros(matrix.shape, dtype=np.float64) for matrix in self))


def sigmoid(a: float) -> float:
    """1 / (1 + exp(-a)), written so that exp never sees a positive argument."""
    return 1.0 / (1.0 + math.exp(-a)) if a >= 0.0 else math.exp(a) / (1.0 + math.exp(a))


def times(matrix: Floats, vector: Floats) -> list[float]:
    """Matrix times column vector, summed exactly and rounded once."""
    return [
        math.fsum(float(matrix[i, j]) * float(vector[j]) for j in range(matrix.shape[1])) for i in range(len(matrix))
    ]


def swiglu_row(expert: SwiGLU, x_D: Floats) -> Floats:
    """Answer of the expert to one row."""
    a_F = times(expert.gate_FD, x_D)
    u_F = times(expert.up_FD, x_D)
    h_F = [a * sigmoid(a) * u for a, u in zip(a_F, u_F, strict=True)]
    return np.array(times(expert.down_DF, np.array(h_F)))


def swiglu_row_backward(expert: SwiGLU, x_D: Floats, dy_D: Floats) -> tuple[Floats, SwiGLU]:
    """Gradients of sum_d dy_d y_d for one row: with respect to x, and to the three matrices.

    dh_f = sum_d down[d, f] dy_d; du_f = dh_f silu(a_f); da_f = dh_f u_f silu'(a_f), where by the product rule
    silu'(a) = sigmoid(a) + a sigmoid(a) (1 - sigmoid(a)); then ddown[d, f] = dy_d h_f,
    dgate[f, d] = da_f x_d, dup[f, d] = du_f x_d and dx_d = sum_f gate[f, d] da_f + up[f, d] du_f.
    """
    F, D = expert.gate_FD.shape
    a_F = times(expert.gate_FD, x_D)
    u_F = times(expert.up_FD, x_D)
    dx_D = np.zeros(D)
    d_expert = expert.zeros()
    for f in range(F):
        s = sigmoid(a_F[f])
        silu = a_F[f] * s
        dh = 0.0
        for d in range(D):
            dh += expert.down_DF[d, f] * dy_D[d]
            d_expert.down_DF[d, f] = dy_D[d] * silu * u_F[f]
        du = dh * silu
        da = dh * u_F[f] * (s + a_F[f] * s * (1.0 - s))
        for d in range(D):
            d_expert.gate_FD[f, d] = da * x_D[d]
            d_expert.up_FD[f, d] = du * x_D[d]
            dx_D[d] += expert.gate_FD[f, d] * da + expert.up_FD[f, d] * du
    return dx_D, d_expert


def swiglu(expert: SwiGLU, x_RD: Floats) -> Floats:
    """Answer of the expert to each of R rows; no rows, no answers."""
    y_RD = np.zeros(x_RD.shape, dtype=np.float64)
    for r in range(x_RD.shape[0]):
        y_RD[r] = swiglu_row(expert, x_RD[r])
    return y_RD


def swiglu_backward(expert: SwiGLU, x_RD: Floats, dy_RD: Floats) -> tuple[Floats, SwiGLU]:
    """Gradients of the rows (R, D) and of the matrices, the latter summed over the rows (zero for none)."""
    dx_RD = np.zeros(x_RD.shape, dtype=np.float64)
    d_expert = expert.zeros()
    for r in range(x_RD.shape[0]):
        dx_RD[r], d_row = swiglu_row_backward(expert, x_RD[r], dy_RD[r])
        for total, part in zip(d_expert, d_row, strict=True):
            total += part
    return dx_RD, d_expert


def block_of(expert: int, experts: int, hidden: int) -> range:
    """The D // E columns that belong to one tagged expert; a remainder at the end belongs to nobody."""
    width = hidden // experts
    return range(expert * width, (expert + 1) * width)


def tagged(expert: int, experts: int, gain: float, x_RD: Floats) -> Floats:
    """Tagged linear expert: `gain` times its own columns of x, else zero."""
    y_RD = np.zeros(x_RD.shape, dtype=np.float64)
    for r in range(x_RD.shape[0]):
        for column in block_of(expert, experts, x_RD.shape[1]):
            y_RD[r, column] = gain * x_RD[r, column]
    return y_RD


def tagged_backward(expert: int, experts: int, gain: float, x_RD: Floats, dy_RD: Floats) -> tuple[Floats, float]:
    """Gradients of the rows, gain * dy in the expert's own columns, and of the gain, sum of dy * x there."""
    dx_RD = np.zeros(x_RD.shape, dtype=np.float64)
    d_gain = 0.0
    for r in range(x_RD.shape[0]):
        for column in block_of(expert, experts, x_RD.shape[1]):
            dx_RD[r, column] = gain * dy_RD[r, column]
            d_gain += dy_RD[r, column] * x_RD[r, column]
    return dx_RD, d_gain
