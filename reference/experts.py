"""Experts: what an expert does to the rows that reach it.

Two kinds: SwiGLU, the usual non-linear expert, and the tagged test expert, linear, which writes into
columns of its own so that the output tells which expert saw a row.

Sources: Shazeer 2020, "GLU variants improve Transformer" equation 6 (SwiGLU); Mixtral section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Expert = Callable[[Tensor, int], Tensor]
"""(rows (R, D), global expert id) -> (R, D), row by row: no row's result depends on another row."""

Parameters = Mapping[tuple[str, int], Tensor]
"""(name, global expert id) -> a parameter of that expert."""


def swiglu(rows_RD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Apply one SwiGLU expert, (R, D) -> (R, D), differentiable in everything.

    Rule: down (silu(gate x) * up x) for every row x, with silu(z) = z sigmoid(z). No bias, so a zero row
    gives zero. R = 0 gives (0, D).

    >>> gate, up, down = torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2, 3)
    >>> swiglu(torch.ones(1, 2), gate, up, down).tolist()
    [[0.0, 0.0]]
    """
    x_RD = rows_RD.double()  # (R, D)
    z_RF = x_RD @ gate_FD.double().T  # (R, F)
    silu_RF = z_RF * z_RF.sigmoid()  # (R, F)
    hidden_RF = silu_RF * (x_RD @ up_FD.double().T)  # (R, F)
    return hidden_RF @ down_DF.double().T  # (R, D)


def swiglu_experts(parameters: Parameters) -> Expert:
    """Make the experts whose parameters are named "gate" (F, D), "up" (F, D) and "down" (D, F).

    >>> sizes = {"gate": (3, 2), "up": (3, 2), "down": (2, 3)}
    >>> expert = swiglu_experts({(name, 7): torch.ones(size) for name, size in sizes.items()})
    >>> expert(torch.zeros(5, 2), 7).shape
    torch.Size([5, 2])
    """

    def expert(rows_RD: Tensor, e: int) -> Tensor:
        return swiglu(rows_RD, parameters["gate", e], parameters["up", e], parameters["down", e])

    return expert


def tagged(rows_RD: Tensor, expert: int, *, experts: int, gain: Tensor | float = 1.0) -> Tensor:
    """Apply the linear test expert, (R, D) -> (R, D).

    Rule: with blocks of B = floor(D / E) columns, expert e copies columns [e*B, (e+1)*B) times `gain` and
    writes zeros elsewhere. Different experts never write the same column, so a sum over different experts
    has one addend per element, and is exact in every dtype and order.

    Degenerate: the last D - E*B columns are always zero. D < E leaves an expert no column, and is an error.

    >>> tagged(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), 1, experts=2, gain=10.0).tolist()
    [[0.0, 0.0, 30.0, 40.0, 0.0]]
    """
    D = rows_RD.shape[1]
    B = D // experts
    if B == 0 or not 0 <= expert < experts:
        raise ValueError(f"expert {expert} of {experts} has no block in D = {D} columns: need 0 <= expert < E <= D")
    own_D = torch.arange(D) // B == expert  # (D,)
    return gain * torch.where(own_D, rows_RD.double(), 0.0)  # (R, D)


def tagged_experts(experts: int, parameters: Parameters) -> Expert:
    """Make the tagged experts whose gains are the 0-dimensional parameters named "gain".

    >>> expert = tagged_experts(2, {("gain", 1): torch.tensor(10.0)})
    >>> expert(torch.tensor([[1.0, 2.0]]), 1).tolist()
    [[0.0, 20.0]]
    """

    def expert(rows_RD: Tensor, e: int) -> Tensor:
        return tagged(rows_RD, e, experts=experts, gain=parameters["gain", e].double())

    return expert
