"""One expert by hand, forward and backward, one row and one number at a time.

SwiGLU of a row x (D): a_f = sum_d gate[f, d] x_d, u_f = sum_d up[f, d] x_d, h_f = silu(a_f) u_f,
y_d = sum_f down[d, f] h_f, with silu(a) = a sigmoid(a). D hidden, F expert hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


# ---- other activations, and biases ---------------------------------------------------------------------------


class Biased(NamedTuple):
    """An expert with biases of everything: gate (F, D) or None, up (F, D), down (D, F); b_gate, b_up (F), b (D)."""

    gate_FD: Floats | None
    up_FD: Floats
    down_DF: Floats
    b_gate_F: Floats | None
    b_up_F: Floats
    b_D: Floats


def activation(name: str, z: float, slope: float) -> tuple[float, float]:
    """Value and derivative of an activation at one number; at the kink of relu its derivative is 0.

    Phi(z) = erfc(-z / sqrt 2) / 2, and its derivative is the normal density. tanh' = 1 - tanh^2.
    """
    if name == "silu":
        s = sigmoid(slope * z)
        return z * s, s + z * slope * s * (1.0 - s)
    if name == "gelu":
        below = math.erfc(-z / math.sqrt(2.0)) / 2.0
        return z * below, below + z * math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
    if name == "gelu_tanh":
        c = math.sqrt(2.0 / math.pi)
        t = math.tanh(c * (z + 0.044715 * z * z * z))
        return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * z * z)
    if name == "relu":
        return (z, 1.0) if z > 0.0 else (0.0, 0.0)
    assert name == "squared_relu"
    return (z * z, 2.0 * z) if z > 0.0 else (0.0, 0.0)


def unit(
    name: str, a: float | None, b: float, limit: float | None, slope: float, offset: float
) -> tuple[float, float, float]:
    """One hidden unit, and its derivatives by a (of gate; 0 without one) and by b (of up).

    With a gate h = act(min(a, c)) (min(max(b, -c), c) + o), without h = act(b). A number that is cut has derivative 0.
    """
    if a is None:
        h, by_b = activation(name, b, slope)
        return h, 0.0, by_b
    a_moves, b_moves = 1.0, 1.0
    if limit is not None:
        if a > limit:
            a, a_moves = limit, 0.0
        if b > limit:
            b, b_moves = limit, 0.0
        elif b < -limit:
            b, b_moves = -limit, 0.0
    act, act_slope = activation(name, a, slope)
    return act * (b + offset), act_slope * (b + offset) * a_moves, act * b_moves


def function_row(
    expert: Biased, x_D: Floats, dy_D: Floats, name: str, limit: float | None, slope: float, offset: float
) -> tuple[Floats, Floats, Biased]:
    """Answer of the expert to one row, and gradients of sum_d dy_d y_d by x and by everything that the expert has.

    y_d = b_d + sum_f down[d, f] h_f; db_d = dy_d; with dh_f = sum_d down[d, f] dy_d, da_f = dh_f dh/da is the gradient
    of b_gate[f] and, times x_d, of gate[f, d]; of up likewise.
    """
    F, D = expert.up_FD.shape
    gated = expert.gate_FD is not None
    zeros = Biased(*(None if part is None else np.zeros(part.shape) for part in expert))
    y_D, dx_D = np.array(expert.b_D, dtype=np.float64), np.zeros(D)
    for d in range(D):
        zeros.b_D[d] = dy_D[d]
    for f in range(F):
        a = None
        if expert.gate_FD is not None and expert.b_gate_F is not None:
            a = math.fsum([*(expert.gate_FD[f, d] * x_D[d] for d in range(D)), expert.b_gate_F[f]])
        b = math.fsum([*(expert.up_FD[f, d] * x_D[d] for d in range(D)), expert.b_up_F[f]])
        h, by_a, by_b = unit(name, a, b, limit, slope, offset)
        dh = 0.0
        for d in range(D):
            y_D[d] += expert.down_DF[d, f] * h
            zeros.down_DF[d, f] = dy_D[d] * h
            dh += expert.down_DF[d, f] * dy_D[d]
        zeros.b_up_F[f] = dh * by_b
        for d in range(D):
            zeros.up_FD[f, d] = dh * by_b * x_D[d]
            dx_D[d] += dh * by_b * expert.up_FD[f, d]
        if gated and zeros.gate_FD is not None and zeros.b_gate_F is not None and expert.gate_FD is not None:
            zeros.b_gate_F[f] = dh * by_a
            for d in range(D):
                zeros.gate_FD[f, d] = dh * by_a * x_D[d]
                dx_D[d] += dh * by_a * expert.gate_FD[f, d]
    return y_D, dx_D, zeros


class NewPart(NamedTuple):
    """What one rank holds of a parameter of a new model."""

    stage: int
    name: str
    expert: int
    shard: tuple[int, int, int] | None
    value: NDArray[np.float32]


def drawn(value: NDArray[np.float32]) -> bool:
    """Whether two elements differ."""
    numbers = value.reshape(-1).tolist()
    return any(number != numbers[0] for number in numbers)


def new_problems(parts: Sequence[NewPart]) -> set[tuple[str, int, int | None]]:
    """What is wrong with the experts of a new model: every part is looked at beside every earlier one."""
    found: set[tuple[str, int, int | None]] = set()
    earliest: dict[int, int] = {}  # a part: the first that is the same part of the same parameter
    for n, part in enumerate(parts):
        for number in part.value.reshape(-1).tolist():
            if math.isnan(number) or math.isinf(number):
                found.add(("not finite", n, None))
        earliest[n] = next(m for m in range(n + 1) if parts[m][:4] == part[:4])
        first = parts[earliest[n]].value
        if first.shape != part.value.shape or first.tobytes() != part.value.tobytes():
            found.add(("replica differs", n, earliest[n]))
    originals = [n for n in range(len(parts)) if earliest[n] == n]
    matrices = [n for n in originals if parts[n].name in ("gate", "up", "down")]
    for n in matrices:
        for m in matrices:
            one, other = parts[m], parts[n]
            if m < n and one[:2] == other[:2] and one.value.shape == other.value.shape:
                pairs = list(zip(one.value.reshape(-1).tolist(), other.value.reshape(-1).tolist(), strict=True))
                differing = sum(left != right for left, right in pairs)
                if drawn(one.value) and drawn(other.value) and not differing > len(pairs) / 2:
                    found.add(("same values", n, m))
    for n in matrices:
        of_one = [m for m in matrices if (parts[m].stage, parts[m].expert) == (parts[n].stage, parts[n].expert)]
        several = len({parts[m].expert for m in matrices}) > 1
        if several and n == of_one[0] and not any(drawn(parts[m].value) for m in of_one):
            found.add(("constant", n, None))
    return found
