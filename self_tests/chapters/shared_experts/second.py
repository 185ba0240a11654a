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

from self_tests.chapters.exchange.second import layer
from self_tests.chapters.experts.second import SwiGLU, sigmoid, swiglu_row

Floats = NDArray[np.float64]


class Shared(NamedTuple):
    """A shared expert: its three matrices and, if it has one, its output bias (D,)."""

    matrices: SwiGLU
    bias_D: Floats | None = None


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
