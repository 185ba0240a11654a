"""Shared experts: experts that every token sees, beside its routed ones.

y_t = sum_k w_tk f_{e_tk}(x_t) + a_t sum_j h_j(x_t): the dense layer of `layer.py` plus one term that knows
nothing of the routing. The factor a_t is 1, or a gate's sigmoid. Gradients are in `whole_layer.py`.

Sources: DeepSeekMoE (Dai et al. 2024) section 3.2; DeepSeek-V3 section 2.1.2; Qwen2-MoE (the gate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.experts import swiglu


class SharedExpert(NamedTuple):
    """The parameters of one shared SwiGLU expert, or their gradients; None where there is no bias."""

    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor
    bias_D: Tensor | None = None


def shared_expert(x_TD: Tensor, expert: SharedExpert) -> Tensor:
    """Apply one shared expert, (T, D) -> (T, D): h(x) = down (silu(gate x) * up x) + bias.

    Degenerate: no bias adds none; T = 0 gives (0, D); F = 0 gives the bias alone.

    Decides: SHARE-01. Source: Shazeer 2020, "GLU variants improve Transformer" equation 6 (SwiGLU).

    >>> nothing = SharedExpert(torch.ones(3, 2), torch.zeros(3, 2), torch.ones(2, 3), torch.tensor([5.0, 7.0]))
    >>> shared_expert(torch.ones(1, 2), nothing).tolist()
    [[5.0, 7.0]]
    """
    h_TD = swiglu(x_TD, expert.gate_FD, expert.up_FD, expert.down_DF)  # (T, D)
    return h_TD if expert.bias_D is None else h_TD + expert.bias_D.double()  # (T, D)


def gate_factors(x_TD: Tensor, gate_D: Tensor | None) -> Tensor:
    """Compute what multiplies the shared part of every token, (T,): a_t = sigmoid(<v, x_t>).

    Degenerate: v = 0 gives 1/2, no gate gives 1.

    Raises:
        ValueError: v is not (D,).

    Decides: SHARE-03. Source: Qwen2-MoE, as in transformers' Qwen2MoeSparseMoeBlock.

    >>> x = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    >>> gate_factors(x, torch.zeros(2)).tolist(), gate_factors(x, None).tolist()
    ([0.5, 0.5], [1.0, 1.0])
    """
    T, D = x_TD.shape
    if gate_D is None:
        return torch.ones(T, dtype=torch.float64)  # (T,)
    if gate_D.shape != (D,):
        raise ValueError(f"the gate {tuple(gate_D.shape)} must be one vector of D = {D}")
    return (x_TD.double() @ gate_D.double()).sigmoid()  # (T,)


def shared_part(x_TD: Tensor, shared: Sequence[SharedExpert], gate_D: Tensor | None = None) -> Tensor:
    """Compute what the shared experts add, (T, D) -> (T, D): a_t sum_j h_j(x_t), one gate for the whole sum.

    It takes no ids, weights, scale or capacity: none of them changes it.

    Args:
        x_TD: the layer's own input: not permuted, weighted, jittered or padded.
        shared: S experts.
        gate_D: v, or None.

    Degenerate: S = 0 gives zeros, gate or not.

    Raises:
        ValueError: as `gate_factors`.

    Decides: SHARE-01, SHARE-02, SHARE-03. Source: DeepSeekMoE section 3.2 (shared expert isolation).

    >>> two = SharedExpert(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(2, 1), torch.tensor([2.0, 4.0]))
    >>> shared_part(torch.ones(1, 2), [two, two, two], torch.zeros(2)).tolist()
    [[3.0, 6.0]]
    """
    sum_TD = torch.zeros(x_TD.shape, dtype=torch.float64)  # (T, D)
    for expert in shared:
        sum_TD = sum_TD + shared_expert(x_TD, expert)  # (T, D)
    return gate_factors(x_TD, gate_D)[:, None] * sum_TD  # (T, D)
