"""The layer: tokens, a routing and experts in, outputs and every gradient out.

The dense formulation, with no permutation in it: y_t = sum over k of w_tk f_{e_tk}(x_t). Each expert is
laid over all (token, slot) places and kept where the routing names it, so that nothing is sorted, sent or
put back. Where it is not named, it sees zeros: a NaN in one token reaches no other.

Sources: Shazeer et al. 2017 equation 1, GShard section 2.2, Mixtral section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.experts import Expert, Parameters

WeightsAt = Literal["output", "input"]


class Batch(NamedTuple):
    """What one rank feeds the layer: tokens, int64 ids, weights and the upstream gradient dL/dy."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    dy_TD: Tensor


@dataclass(frozen=True)
class Gradients:
    """What comes out, in float64: y, and dL/dx, dL/dweights and dL/dparameter by (name, expert)."""

    y_TD: Tensor
    dx_TD: Tensor
    dweights_TK: Tensor
    parameters: Mapping[tuple[str, int], Tensor]


def forward(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert: Expert, *, weights_at: WeightsAt = "output"
) -> Tensor:
    """Compute the layer's output, (T, D) and (T, K) -> (T, D), differentiable in all but the ids.

    Rule: y_t = sum_k w_tk f_{e_tk}(x_t), or with `weights_at="input"` y_t = sum_k f_{e_tk}(w_tk x_t). The
    two are equal for linear experts without bias and differ for all others, SwiGLU included.

    Degenerate: an empty slot (-1) adds nothing, whatever its weight holds, and a token of only empty slots
    gives 0 (the residual path is the caller's). A weight of 0 is not an empty slot: at the input, f(0) may
    not be 0. An expert in two slots of a token adds twice. T = 0 gives (0, D).

    >>> x, ids = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), torch.tensor([[0, 1], [-1, 1]])
    >>> w = torch.tensor([[0.5, 0.25], [9.0, 1.0]])
    >>> forward(x, ids, w, lambda rows, e: rows * 10**e).tolist()
    [[3.0, 3.0, 3.0], [20.0, 20.0, 20.0]]
    >>> forward(x, ids, w, lambda rows, e: rows**2 * 10**e, weights_at="input")[0].tolist()
    [0.875, 0.875, 0.875]
    """
    if weights_at not in ("output", "input"):
        raise ValueError(f"weights are applied at the output or at the input, not at {weights_at!r}")
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    y_TD = torch.zeros(T, D, dtype=torch.float64)  # (T, D)
    x_T1D, w_TK1 = x_TD.double()[:, None, :], weights_TK.double()[:, :, None]  # (T, 1, D), (T, K, 1)
    for e in ids_TK.unique().tolist():
        if e < 0:
            continue
        here_TK1 = (ids_TK == e)[:, :, None]  # (T, K, 1)
        x_TKD = torch.where(here_TK1, x_T1D, 0.0)  # (T, K, D)
        own_TK1 = torch.where(here_TK1, w_TK1, 0.0)  # (T, K, 1)
        if weights_at == "input":
            x_TKD = own_TK1 * x_TKD  # (T, K, D)
        out_TKD = expert(x_TKD.reshape(T * K, D), e).reshape(T, K, D)  # (T, K, D)
        if weights_at == "output":
            out_TKD = own_TK1 * out_TKD  # (T, K, D)
        y_TD = y_TD + torch.where(here_TK1, out_TKD, 0.0).sum(dim=1)  # (T, D)
    return y_TD


def gradients(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    build: Callable[[Parameters], Expert],
    parameters: Parameters,
    *,
    weights_at: WeightsAt = "output",
) -> Gradients:
    """Compute the output and, given dL/dy, the gradient of L in x, in the weights and in every parameter.

    Rule: autograd through `forward`. `build` makes the experts from float64 copies of `parameters`, so that
    they can be told apart and differentiated: `experts.swiglu_experts`, `experts.tagged_experts`.

    Degenerate: empty slots have weight gradient 0; experts without tokens have gradients of zeros, which are
    returned and never left out; T = 0 gives empty and zero gradients.

    Decides: DROP-12, EXCH-05, EXCH-06, EXCH-10, EXCH-22, EXCH-38, EXCH-39, EXCH-41, EXCH-42, EXCH-44, EXPT-01,
    EXPT-03, EXPT-05, FAST-05, FAST-14, FAST-15, GRAD-02, GRAD-03, GRAD-04, GRAD-05, GRAD-06, GROUP-06, OVLP-13,
    PACK-02, PACK-04, PACK-05, PACK-06, PACK-08, PACK-11, PACK-13, PACK-14, PACK-15. Source: chain rule.

    >>> x, ids, w, dy = torch.ones(2, 3), torch.tensor([[0], [-1]]), torch.full((2, 1), 0.5), torch.ones(2, 3)
    >>> double_or_nothing = {("gain", 0): torch.tensor(2.0), ("gain", 1): torch.tensor(0.0)}
    >>> g = gradients(x, ids, w, dy, lambda p: lambda rows, e: p["gain", e] * rows, double_or_nothing)
    >>> g.dx_TD.tolist(), g.dweights_TK.tolist()
    ([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [[6.0], [0.0]])
    >>> {expert: dgain.item() for (_, expert), dgain in g.parameters.items()}
    {0: 1.5, 1: 0.0}
    """
    x, w = _leaf(x_TD), _leaf(weights_TK)
    p = {name: _leaf(value) for name, value in parameters.items()}
    y_TD = forward(x, ids_TK, w, build(p), weights_at=weights_at)  # (T, D)
    if not y_TD.requires_grad:  # nothing was routed: y is a constant, and every gradient zero
        y_TD.requires_grad_()
    dx, dw, *dp = torch.autograd.grad(
        y_TD, [x, w, *p.values()], dy_TD.double(), allow_unused=True, materialize_grads=True
    )
    return Gradients(y_TD.detach(), dx, dw, dict(zip(p, dp, strict=True)))


def global_batch(batches: Sequence[Batch]) -> Batch:
    """Put the tokens of all ranks into one batch, (T_0 + T_1 + ..., ...). K must be the same on all ranks.

    Rule: which rank holds a token decides nothing about what the layer computes for it.

    >>> def rank(T):
    ...     return Batch(torch.ones(T, 5), torch.zeros(T, 4), torch.ones(T, 4), torch.ones(T, 5))
    >>> [tuple(part.shape) for part in global_batch([rank(1), rank(2)])]
    [(3, 5), (3, 4), (3, 4), (3, 5)]
    """
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def _leaf(value: Tensor) -> Tensor:
    """Copy a tensor to a float64 leaf, so that the caller's own graph and gradients stay as they are."""
    return value.detach().double().clone().requires_grad_()
