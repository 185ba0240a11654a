"""A whole layer: logits, weights of the selected, routed experts and shared experts, with every gradient.

y_t = sum_k w_tk f_{e_tk}(x_t) + a_t sum_j h_j(x_t), where the weights w are those of the router's scores. It is
`shared_experts.forward` on the weights of `routing.weights`; the selected experts are given, as the selection has no
gradient. Where slots are dropped the sum is over the kept ones, with the weights before the drop as in
`capacity_output.after_drop`; the kept slots are given too.

Sources: DeepSeek-V3 section 2.1.2 (the equations of the layer); Shazeer et al. 2017 equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.reference.capacity.after_drops import after_drop
from moe_conformance.reference.exchange.layer import WeightsAt, forward
from moe_conformance.reference.experts import swiglu_experts
from moe_conformance.reference.routing import routes
from moe_conformance.reference.routing.routes import Routed, Score
from moe_conformance.reference.shared_experts.shared import SharedExpert, gate_factors, shared_part

Key = tuple[str, int | None]
"""(name, expert): "router", "gate" "up" "down" of expert e, "shared_gate" "shared_up" "shared_down" of shared expert
j, its "shared_bias" (D,) where it has one, "shared_score" (1, D); None for what is not an expert's."""

Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(routed part (T, D), sum of the S shared experts, their biases in it, (T, D), gate factors (T, 1), the biases (S, D))
-> y (T, D)"""

Drop = Callable[[Tensor, Tensor, Tensor], Routed]
"""(ids, weights before the drop, which are kept, (T, K) each) -> ids and weights after it"""


@dataclass(frozen=True)
class Weighing:
    """How the scores of the selected become weights; see `routing.weights`."""

    score: Score
    normalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class LayerGradients:
    """What comes out, float64: y, dL/dx and dL/dparameter."""

    y_TD: Tensor
    dx_TD: Tensor
    parameters: Mapping[Key, Tensor]


def mixed(routed_TD: Tensor, shared_TD: Tensor, factor_T1: Tensor, biases_SD: Tensor) -> Tensor:
    """Put the parts together, (T, D): y = routed + a sum_j h_j.

    The biases are there for other rules: h_j has its own, which the gate multiplies with the rest of it.

    Decides: SHARE-01, SHARE-02, SHARE-03. Source: DeepSeekMoE section 3.2.

    >>> mixed(torch.tensor([[3.0]]), torch.tensor([[4.0]]), torch.tensor([[0.5]]), torch.tensor([[1.0]])).item()
    5.0
    """
    return routed_TD + factor_T1 * shared_TD  # (T, D)


def gradients(
    x_TD: Tensor,
    ids_TK: Tensor,
    dy_TD: Tensor,
    parameters: Mapping[Key, Tensor],
    weighing: Weighing,
    *,
    weights_at: WeightsAt = "output",
    kept_TK: Tensor | None = None,
    mix: Mix = mixed,
    drop: Drop = after_drop,
) -> LayerGradients:
    """Compute y and, given dL/dy, the gradient in x and in every parameter, by autograd.

    Args:
        x_TD: tokens.
        ids_TK: int64, the selected of every token, all of them different.
        dy_TD: dL/dy.
        parameters: by `Key`; the shared experts are numbered from 0. What selects only ("balance_bias") is left out.
        weighing: of the selected.
        weights_at: where the weights are applied.
        kept_TK: bool, which of the selected are not dropped; all of them if None.
        mix: how the parts are put together; by another rule than `mixed`, what a mistake would yield.
        drop: what becomes of the dropped; by another rule than `after_drop`, what a mistake would yield.

    Degenerate: an expert without tokens has gradients of zeros, which are returned and never left out, and so has an
    expert that keeps none; T = 0 gives empty and zero gradients; without shared experts the layer is the routed one.

    Decides: DROP-09, DROP-10, DROP-11, GRAD-18, SHARE-01, SHARE-02, SHARE-03, SHARE-04, SHARE-05, SHARE-06,
    SHARE-07, SHARE-08. Source: chain rule.

    >>> one = torch.ones(1, 1)
    >>> p = {(name, 0): one for name in ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")}
    >>> p["router", None] = one
    >>> g = gradients(one, torch.tensor([[0]]), one, p, Weighing("softmax"))
    >>> round(g.y_TD.item() / one.sigmoid().item(), 6), round(g.parameters["shared_down", 0].item(), 6)
    (2.0, 0.731059)
    >>> g = gradients(one, torch.tensor([[0]]), one, p, Weighing("sigmoid"), kept_TK=torch.tensor([[False]]))
    >>> round(g.y_TD.item() / one.sigmoid().item(), 6), g.parameters["router", None].item()
    (1.0, 0.0)
    """
    x = _leaf(x_TD)
    p = {key: _leaf(value) for key, value in parameters.items() if key != ("balance_bias", None)}
    w_TK = routes.weights(
        x @ p["router", None].T, ids_TK, score=weighing.score, normalise=weighing.normalise, scale=weighing.scale
    )  # (T, K)
    if kept_TK is not None:
        after = drop(ids_TK, w_TK, kept_TK)
        ids_TK, w_TK = after.ids_TK, after.weights_TK  # (T, K) each
    routed = swiglu_experts({(name, e): value for (name, e), value in p.items() if e is not None})
    routed_TD = forward(x, ids_TK, w_TK, routed, weights_at=weights_at)  # (T, D)
    shared = shared_of(p)
    shared_TD = shared_part(x, shared)  # (T, D)
    score = p.get(("shared_score", None))
    factor_T1 = gate_factors(x, None if score is None else score[0])[:, None]  # (T, 1)
    y_TD = mix(routed_TD, shared_TD, factor_T1, _biases(shared, x.shape[1]))  # (T, D)
    if not y_TD.requires_grad:  # nothing was kept, and nothing is shared: y is a constant, and every gradient zero
        y_TD.requires_grad_()
    dx, *dp = torch.autograd.grad(y_TD, [x, *p.values()], dy_TD.double(), allow_unused=True, materialize_grads=True)
    return LayerGradients(y_TD.detach(), dx, dict(zip(p, dp, strict=True)))


def shared_of(parameters: Mapping[Key, Tensor]) -> Sequence[SharedExpert]:
    """Take the shared experts out of the parameters, by number."""
    numbers = sorted(j for name, j in parameters if name == "shared_gate" and j is not None)
    shared = []
    for j in numbers:
        gate_FD, up_FD, down_DF = (parameters[f"shared_{name}", j] for name in ("gate", "up", "down"))
        shared.append(SharedExpert(gate_FD, up_FD, down_DF, parameters.get(("shared_bias", j))))
    return shared


def _biases(shared: Sequence[SharedExpert], D: int) -> Tensor:
    """Stack the biases, (S, D): zeros where an expert has none."""
    each = [torch.zeros(D, dtype=torch.float64) if of.bias_D is None else of.bias_D for of in shared]
    return torch.stack(each) if each else torch.zeros(0, D, dtype=torch.float64)  # (S, D)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().double().clone().requires_grad_()
