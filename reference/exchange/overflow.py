"""Overflow: how large a number may become on the way to an output, in any order of its sums.

A sum whose terms fit may have no number of the dtype that holds it: then infinity is its right value. Where all
magnitudes added up fit, nothing on the way can overflow, and an output that is not finite is wrong.

Source: IEEE 754 (overflow in rounding to nearest); triangle inequality.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import WeightsAt, forward
from moe_conformance.reference.experts import Expert, Parameters


def swiglu_peaks(parameters: Parameters) -> Expert:
    """Make experts that return, in place of their outputs, the largest magnitude on the way to each, (R, D) -> (R, D).

    Rule: the larger of what the output's own sum can reach, sum_f |down_df hidden_f|, and of everything that
    all outputs of the row share: sum_d |gate_fd x_d|, sum_d |up_fd x_d| and |hidden_f| for every f.

    Degenerate: a row of zeros, or of a token that another expert has, gives zeros.

    >>> expert = swiglu_peaks({(name, 0): torch.ones(2, 2) for name in ("gate", "up", "down")})
    >>> expert(torch.tensor([[3.0, -3.0], [0.0, 0.0]]), 0).tolist()
    [[6.0, 6.0], [0.0, 0.0]]
    """

    def expert(rows_RD: Tensor, e: int) -> Tensor:
        gate_FD, up_FD, down_DF = (parameters[name, e].double() for name in ("gate", "up", "down"))
        x_RD = rows_RD.double()  # (R, D)
        z_RF = x_RD @ gate_FD.T  # (R, F)
        hidden_RF = (z_RF * z_RF.sigmoid() * (x_RD @ up_FD.T)).abs()  # (R, F)
        inside_R3F = torch.stack([x_RD.abs() @ gate_FD.abs().T, x_RD.abs() @ up_FD.abs().T, hidden_RF], 1)
        return torch.maximum(hidden_RF @ down_DF.abs().T, inside_R3F.amax((1, 2))[:, None])  # (R, D)

    return expert


def must_be_finite(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    peaks: Expert,
    dtype: torch.dtype,
    addends: int,
    *,
    weights_at: WeightsAt = "output",
) -> Tensor:
    """Mark the elements of the output that no order of sums can overflow, (T, D) bool.

    Args:
        x_TD: Tokens, finite.
        ids_TK: Expert ids, -1 for an empty slot.
        weights_TK: Routing weights.
        peaks: The experts' peaks instead of their outputs, such as `swiglu_peaks`.
        dtype: In which the layer computes.
        addends: The most terms in one chain of sums and products, each of which rounds once.
        weights_at: Where weights multiply.

    Rule: sum_k max(|w_tk|, 1) peak_k <= largest / (1 + u)^addends, u the unit roundoff: an unweighted expert output
    is on the way too. With `weights_at="input"` the weight is in the peak already.

    Degenerate: T = 0 gives (0, D); a token without a routed slot has the output 0, which must be finite.

    Decides: EXCH-07. Source: IEEE 754 (overflow in rounding to nearest); triangle inequality.

    >>> x, ids, weights = torch.ones(1, 2), torch.tensor([[0, 1]]), torch.ones(1, 2)
    >>> def peaks(rows, e):
    ...     return rows * torch.tensor([3e4, 4e4])
    >>> must_be_finite(x, ids, weights, peaks, torch.float16, 2).tolist()
    [[True, False]]
    """
    largest = torch.finfo(dtype).max / (1 + torch.finfo(dtype).eps / 2) ** addends
    at_least_one_TK = weights_TK.double().abs().clamp_min(1.0)
    if weights_at == "output":
        reached_TD = forward(x_TD, ids_TK, at_least_one_TK, peaks)
    else:
        reached_TD = forward(x_TD, ids_TK, weights_TK, peaks, weights_at="input")
    return reached_TD <= largest  # NaN and infinity are beyond it
