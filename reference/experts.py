"""Experts: what an expert does to the rows that reach it.

Three kinds: SwiGLU, the usual non-linear expert; experts with other activations and with biases; and the tagged
test expert, linear, which writes into columns of its own so that the output tells which expert saw a row.

Sources: Shazeer 2020, "GLU variants improve Transformer" equations 5 and 6 (ReGLU, GEGLU, SwiGLU); Mixtral section
2.1; Hendrycks and Gimpel 2016 (GELU and its approximation); So et al. 2021 (squared ReLU); gpt-oss reference model.

And which parameters of a new model are equal: replicas that start with different values stay different, since gradients
alone are reduced; experts that start with equal values, and are routed to alike, stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

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


# ---- experts of a new model ----------------------------------------------------------------------------------------

Kind = Literal["not finite", "constant", "replica differs", "same values"]
_MATRICES = ("gate", "up", "down")


class Part(NamedTuple):
    """A parameter, or a shard of it, as one rank holds it."""

    rank: int
    stage: int  # of the pipeline; each has layers of its own
    name: str  # as in `Named`
    expert: int | None
    shard: tuple[int, int, int] | None
    value: Tensor


class Problem(NamedTuple):
    """What is wrong with a part, by its place in what was given, and with which earlier one it was compared."""

    kind: Kind
    part: int
    other: int | None = None


def problems(parts: Sequence[Part]) -> list[Problem]:
    """List what is wrong with the parameters of a new model, in the order of kinds and parts.

    Rule: every element is finite. Parts of one name, expert, shard and stage are replicas, and have the bytes of the
    first of them. Any two other parts of one name, stage and shape, of a matrix (gate, up, down) that is drawn at
    random in both, differ in more than half of their elements: those of different experts on any ranks, and different
    shards of one expert. If there are several experts, each has a matrix that is drawn at random.

    A matrix is drawn at random if not all of its elements are equal.

    Degenerate: no part, or one of one expert, has nothing to be compared with. Biases need only be equal over replicas.

    Decides: EXPT-11. Source: arithmetic.

    >>> one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 2.5]])
    >>> held = [Part(0, 0, "up", 0, None, one), Part(1, 0, "up", 1, None, one), Part(2, 0, "up", 0, None, two)]
    >>> problems(held)
    [Problem(kind='replica differs', part=2, other=0), Problem(kind='same values', part=1, other=0)]
    >>> problems([Part(0, 0, "up", 0, None, one), Part(1, 0, "up", 1, None, two)])
    []
    """
    found = [Problem("not finite", n) for n, part in enumerate(parts) if not bool(part.value.isfinite().all())]
    firsts = _firsts(parts)
    found += [Problem("constant", n) for n in _without_draws(parts, sorted(firsts.values()))]
    for n, part in enumerate(parts):
        first = firsts[_key(part)]
        if not _same_bytes(part.value, parts[first].value):
            found.append(Problem("replica differs", n, first))
    for first, second in combinations(sorted(firsts.values()), 2):
        if _too_alike(parts[first], parts[second]):
            found.append(Problem("same values", second, first))
    return found


def _key(part: Part) -> tuple[object, ...]:
    return part.stage, part.name, part.expert, part.shard


def _firsts(parts: Sequence[Part]) -> dict[tuple[object, ...], int]:
    """Return the first of all replicas of each part."""
    firsts: dict[tuple[object, ...], int] = {}
    for n, part in enumerate(parts):
        firsts.setdefault(_key(part), n)
    return firsts


def _without_draws(parts: Sequence[Part], firsts: Sequence[int]) -> list[int]:
    """Return the first matrix of every expert that has none with different elements, if there are several experts."""
    matrices: dict[tuple[int, int | None], list[int]] = {}
    for n in firsts:
        if parts[n].name in _MATRICES:
            matrices.setdefault((parts[n].stage, parts[n].expert), []).append(n)
    if len({expert for _, expert in matrices}) < 2:
        return []
    return [held[0] for held in matrices.values() if not any(_is_drawn(parts[n].value) for n in held)]


def _too_alike(one: Part, other: Part) -> bool:
    if (one.stage, one.name) != (other.stage, other.name) or one.name not in _MATRICES:
        return False
    if one.value.shape != other.value.shape or not (_is_drawn(one.value) and _is_drawn(other.value)):
        return False
    return 2 * int((one.value == other.value).sum()) >= one.value.numel()


def _is_drawn(value: Tensor) -> bool:
    return value.numel() > 0 and bool((value != value.flatten()[0]).any())


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))
