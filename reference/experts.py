"""Experts: what an expert does to the rows that reach it.

Three kinds: SwiGLU, the usual non-linear expert; experts with other activations and with biases; and the tagged
test expert, linear, which writes into columns of its own so that the output tells which expert saw a row.

Sources: Shazeer 2020, "GLU variants improve Transformer" equations 5 and 6 (ReGLU, GEGLU, SwiGLU); Mixtral section
2.1; Hendrycks and Gimpel 2016 (GELU and its approximation); So et al. 2021 (squared ReLU); gpt-oss reference model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

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


class Function(NamedTuple):
    """What an expert does between its projections; by default it is SwiGLU."""

    activation: str = "silu"  # or gelu, gelu_tanh, relu, squared_relu
    gated: bool = True
    limit: float | None = None  # the three below are of gated experts; None: nothing is cut
    slope: float = 1.0
    offset: float = 0.0


def activated(z: Tensor, activation: str, slope: float = 1.0) -> Tensor:
    """Apply an activation, element by element; the slope multiplies z in the sigmoid of silu.

    >>> z = torch.tensor([-2.0, 0.0, 2.0])
    >>> [activated(z, name).tolist() for name in ("relu", "squared_relu")]
    [[0.0, 0.0, 2.0], [0.0, 0.0, 4.0]]
    """
    if activation == "silu":
        return z * (slope * z).sigmoid()
    if activation == "gelu":
        return z * (-z / math.sqrt(2)).erfc() / 2  # accurate where 1 + erf cancels
    if activation == "gelu_tanh":
        return 0.5 * z * (1 + (math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)).tanh())
    positive = torch.where(z > 0, z, 0.0)
    return positive if activation == "relu" else positive**2


def hidden(function: Function, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
    """Compute what the down projection gets, (R, F) -> (R, F), differentiable.

    Rule: act(min(gate, limit)) * (min(max(up, -limit), limit) + offset); without a gate act(up). Where a limit cuts,
    the derivative is 0.

    >>> gate, up = torch.tensor([[9.0, 0.0]], requires_grad=True), torch.tensor([[-9.0, 9.0]])
    >>> out = hidden(Function("relu", limit=7.0, offset=1.0), gate, up)
    >>> out.tolist(), torch.autograd.grad(out.sum(), gate)[0].tolist()
    ([[-42.0, 0.0]], [[0.0, 0.0]])
    """
    if gate_RF is None:
        return activated(up_RF, function.activation)
    if function.limit is not None:
        gate_RF = torch.where(gate_RF > function.limit, function.limit, gate_RF)
        up_RF = torch.where(up_RF.abs() > function.limit, function.limit * up_RF.detach().sign(), up_RF)
    return activated(gate_RF, function.activation, function.slope) * (up_RF + function.offset)


def function_experts(function: Function) -> Callable[[Parameters], Expert]:
    """Make experts of a function: of "up" (F, D), "down" (D, F), with a gate "gate" (F, D), and of biases.

    Biases that there are of "bias_gate", "bias_up" (F,) and "bias" (D,) are added to what gate, up and down give. So a
    zero row need not give zero. With all biases, and SwiGLU between gate and up of zero, only the output bias is left:

    >>> zeros = {(name, 7): torch.zeros(size) for name, size in {"gate": (3, 2), "up": (3, 2), "down": (2, 3)}.items()}
    >>> expert = function_experts(Function())(zeros | {("bias", 7): torch.tensor([5.0, -1.0])})
    >>> expert(torch.ones(1, 2), 7).tolist()
    [[5.0, -1.0]]

    Decides: EXPT-06, EXPT-07.
    """

    def build(parameters: Parameters) -> Expert:
        def projected(rows: Tensor, e: int, name: str, bias: str) -> Tensor:
            out = rows @ parameters[name, e].double().T
            return out + parameters[bias, e].double() if (bias, e) in parameters else out

        def expert(rows_RD: Tensor, e: int) -> Tensor:
            x_RD = rows_RD.double()  # (R, D)
            gate_RF = projected(x_RD, e, "gate", "bias_gate") if function.gated else None  # (R, F)
            hidden_RF = hidden(function, gate_RF, projected(x_RD, e, "up", "bias_up"))  # (R, F)
            return projected(hidden_RF, e, "down", "bias")  # (R, D)

        return expert

    return build


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
