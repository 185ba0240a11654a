"""The gate of a router: the linear map from tokens to logits, with a bias or without.

Source: the chain rule; behaviour of GPT-OSS routers (OpenAI 2025), whose gate is a linear layer with a bias.
"""

from __future__ import annotations

from torch import Tensor


def logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute the logits, (T, D), (E, D) and (E,) -> float64 (T, E), differentiable in all three.

    Rule: l_te = sum_d x_td W_ed + c_e, used for selection and weights alike.

    Degenerate: c = 0 changes no value, and has a gradient. T = 0 gives (0, E).

    Decides: ROUTE-10, ROUTE-11, ROUTE-19. Source: chain rule; behaviour of GPT-OSS routers.

    >>> import torch
    >>> logits(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0.5, -1.0])).tolist()
    [[5.5, 1.0]]
    """
    l_TE = x_TD.double() @ weight_ED.double().T  # (T, E)
    return l_TE if bias_E is None else l_TE + bias_E.double()  # (E,) over all tokens
