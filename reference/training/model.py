"""A model to train: dense and MoE layers with residuals, and the mean of a squared error over counted tokens.

Layer number l has the parameters "layer{l}/gate", "layer{l}/up" (F, D) and "layer{l}/down" (D, F): of no expert if it
is dense, of every expert if it is an MoE layer, which has a "layer{l}/router" (E, D) besides. T tokens, K experts of
each.

Sources: Shazeer 2020 (SwiGLU); Shazeer et al. 2017 equation 1 (MoE layer); He et al. 2016 (residuals).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import forward
from moe_conformance.reference.experts import swiglu, swiglu_experts
from moe_conformance.reference.routing.routes import route, weights

Key = tuple[str, int | None]
Parameters = Mapping[Key, Tensor]


class Tokens(NamedTuple):
    """Tokens of a whole step, or of some of its ranks and microbatches, one after the other."""

    x_TD: Tensor
    target_TD: Tensor
    counted_T: Tensor  # bool


class Graded(NamedTuple):
    """The loss, float64 (), and its gradient in every parameter."""

    loss: Tensor
    gradients: dict[Key, Tensor]


def layer_of(parameters: Parameters, number: int) -> dict[Key, Tensor]:
    """Take out the parameters of a layer, without its number; nothing if there is no such layer."""
    prefix = f"layer{number}/"
    return {(name.removeprefix(prefix), e): p for (name, e), p in parameters.items() if name.startswith(prefix)}


def layers_of(parameters: Parameters) -> list[dict[Key, Tensor]]:
    """Take out the parameters of all layers, in order."""
    names = {name.split("/")[0] for name, _ in parameters}
    return [layer_of(parameters, number) for number in range(len(names))]


def selected(x_TD: Tensor, layer: Parameters, top_k: int) -> Tensor:
    """Select the experts of every token in an MoE layer, int64 (T, K): those with the largest softmax scores."""
    return route(x_TD @ layer["router", None].double().T, top_k=top_k, score="softmax").ids_TK


def outputs(x_TD: Tensor, parameters: Parameters, top_k: int) -> Tensor:
    """Compute y, (T, D) -> (T, D), differentiable in the parameters.

    Rule: h <- h + f_l(h) for every layer in turn; f of a dense layer is one SwiGLU, f of an MoE layer the sum over the
    K selected experts of w_k times a SwiGLU each, w the softmax scores over all experts, not normalised again.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> y = outputs(one, {(f"layer0/{name}", None): one for name in ("gate", "up", "down")}, 1)
    >>> round(y.item() - one.sigmoid().item(), 12)
    1.0
    """
    h_TD = x_TD.double()  # (T, D)
    for layer in layers_of(parameters):
        if ("router", None) in layer:
            logits_TE = h_TD @ layer["router", None].double().T  # (T, E)
            ids_TK = selected(h_TD.detach(), layer, top_k)
            experts = swiglu_experts({(name, e): p for (name, e), p in layer.items() if e is not None})
            h_TD = h_TD + forward(h_TD, ids_TK, weights(logits_TE, ids_TK, score="softmax"), experts)
        else:
            h_TD = h_TD + swiglu(h_TD, *(layer[name, None] for name in ("gate", "up", "down")))
    return h_TD


def graded(tokens: Tokens, parameters: Parameters, top_k: int, *, divisor: float | None = None) -> Graded:
    """Compute the loss of tokens, and its gradients by autograd.

    Rule: L = (1 / n) sum over counted tokens of |y_t - target_t|^2 / 2, with n the number of counted tokens, of all
    ranks and microbatches of the step. A token that is not counted adds nothing, neither to n. `divisor` takes the
    place of n: for a part of the tokens of a step.

    Degenerate: no counted token: the loss and all gradients are 0, not NaN. An expert without counted tokens has a
    gradient of zeros.

    Decides: GRAD-14, TRAIN-03, TRAIN-04. Source: arithmetic, the mean of unequal groups is not the mean of their means.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> p = {(f"layer0/{name}", None): 0 * one for name in ("gate", "up", "down")}
    >>> tokens = Tokens(torch.tensor([[1.0], [1.0], [1.0]]), torch.zeros(3, 1), torch.tensor([True, False, True]))
    >>> graded(tokens, p, 1).loss.item()
    0.5
    """
    leaves = {key: value.detach().double().requires_grad_() for key, value in parameters.items()}
    y_TD = outputs(tokens.x_TD, leaves, top_k)
    of_token_T = (y_TD - tokens.target_TD.double()).square().sum(1) / 2  # (T,)
    n = max(int(tokens.counted_T.sum()), 1) if divisor is None else divisor
    loss = of_token_T[tokens.counted_T].sum() / n
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Graded(loss.detach(), dict(zip(leaves, found, strict=True)))
