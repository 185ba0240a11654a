"""Second derivatives: a gradient, differentiated once more by what it was computed of.

y_t = sum_k w_tk f_{e_tk}(x_t), u the upstream gradient of y, g = dL/dx = (dy/dx)^T u, and s = sum_t <g_t, v_t> for a
direction v. s is linear in u, and ds/du = (dy/dx) v, the derivative of y along v. It is linear in the weights too, if
these are applied to the experts' outputs.

Sources: chain rule; Pearlmutter 1994, "Fast exact multiplication by the Hessian" (derivatives along a direction).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import Batch, WeightsAt
from moe_conformance.reference.experts import Expert


class SecondDerivatives(NamedTuple):
    """Derivatives of s in float64, each with the size of what was added up for it, by which rounding errors scale."""

    upstream_TD: Tensor  # ds/du
    weights_TK: Tensor | None  # ds/dw; None with weights at the input, in which s is not linear
    upstream_size_T1: Tensor
    weights_size_TK: Tensor


def second_derivatives(
    batch: Batch, directions_TD: Tensor, expert: Expert, *, weights_at: WeightsAt = "output"
) -> SecondDerivatives:
    """Differentiate s = sum_t <dL/dx_t, v_t> by the upstream gradient and by the routing weights.

    Rule: with j_tk the derivative of f_{e_tk} at x_t along v_t, ds/du_t = sum_k w_tk j_tk, and ds/dw_tk = <j_tk, u_t>.
    With `weights_at="input"` j_tk is that at w_tk x_t.

    Sizes: the largest element of sum_k |w_tk j_tk|, and the largest element of j_tk times the sum of |u_t|.

    Degenerate: an empty slot has derivative 0 and adds none; T = 0 gives empty ones. Linear experts have j = f(v).

    Decides: GRAD-20. Source: chain rule.

    >>> batch = Batch(torch.ones(1, 2), torch.tensor([[1, -1]]), torch.tensor([[0.5, 9.0]]), torch.tensor([[1.0, 2.0]]))
    >>> found = second_derivatives(batch, torch.tensor([[3.0, 4.0]]), lambda rows, e: rows**2)
    >>> found.upstream_TD.tolist(), found.weights_TK.tolist(), found.upstream_size_T1.tolist()
    ([[3.0, 4.0]], [[22.0, 0.0]], [[4.0]])
    """
    x_TD, ids_TK, weights_TK, u_TD = batch.x_TD.double(), batch.ids_TK, batch.weights_TK.double(), batch.dy_TD.double()
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    along_TKD = torch.zeros(T, K, D, dtype=torch.float64)
    for e in ids_TK.unique().tolist():
        if e < 0:
            continue
        token_P, slot_P = (ids_TK == e).nonzero(as_tuple=True)
        scale_P1 = weights_TK[token_P, slot_P, None] if weights_at == "input" else torch.ones(len(token_P), 1)
        rows_PD, v_PD = scale_P1 * x_TD[token_P], directions_TD.double()[token_P]
        along_TKD[token_P, slot_P] = _along(expert, e, rows_PD, v_PD)
    weighted_TKD = torch.where(ids_TK >= 0, weights_TK, 0.0)[:, :, None] * along_TKD
    largest_TK = along_TKD.abs().amax(2)
    return SecondDerivatives(
        weighted_TKD.sum(1),
        (along_TKD * u_TD[:, None, :]).sum(2) if weights_at == "output" else None,
        weighted_TKD.abs().sum(1).amax(1, keepdim=True),
        largest_TK * u_TD.abs().sum(1, keepdim=True),
    )


def _along(expert: Expert, e: int, rows_RD: Tensor, v_RD: Tensor) -> Tensor:
    """Return the derivative of an expert along v: that of its gradient, which is linear in the upstream one."""
    rows_RD = rows_RD.requires_grad_()
    out_RD = expert(rows_RD, e)
    upstream_RD = torch.zeros_like(out_RD, requires_grad=True)
    (gradient_RD,) = torch.autograd.grad(out_RD, rows_RD, upstream_RD, create_graph=True)
    (along_RD,) = torch.autograd.grad(gradient_RD, upstream_RD, v_RD)
    return along_RD
