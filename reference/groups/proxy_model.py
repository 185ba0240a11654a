"""A small model with two MoE layers on one device: what every division over ranks has to give.

Every block mixes along the sequence, so that cp and tp matter, and then routes: with a_t the mean of h_0 .. h_t,

    h'_t = h_t + out tanh(in a_t),  h''_t = h'_t + moe(h'_t),

where moe is the layer of `whole_layer`. Sequences do not see each other.

Source: arithmetic; the shape of a transformer block (Vaswani et al. 2017), its attention replaced by a causal mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import forward
from moe_conformance.reference.experts import swiglu_experts
from moe_conformance.reference.routing import routes
from moe_conformance.reference.shared_experts.shared import gate_factors, shared_part
from moe_conformance.reference.shared_experts.whole_layer import Key, Weighing, shared_of

Block = Mapping[Key, Tensor]
"""("mix_in", None) (H, D), ("mix_out", None) (D, H), and the parameters of `whole_layer`."""


@dataclass(frozen=True)
class ModelGradients:
    """What comes out, float64: y, dL/dx and dL/dparameter, of every sequence and block; and the clearest doubt."""

    y: tuple[Tensor, ...]
    dx: tuple[Tensor, ...]
    parameters: tuple[Mapping[Key, Tensor], ...]
    margin: float  # by which the least clear choice of any token in any block was made, in selection scores


def causal_mean(h_SD: Tensor) -> Tensor:
    """Average everything up to each token, (S, D) -> (S, D).

    >>> causal_mean(torch.tensor([[2.0], [4.0], [9.0]])).flatten().tolist()
    [2.0, 3.0, 5.0]
    """
    counts_S1 = torch.arange(1, len(h_SD) + 1, dtype=h_SD.dtype)[:, None]  # (S, 1)
    return h_SD.cumsum(0) / counts_S1  # (S, D)


def block(h_SD: Tensor, parameters: Block, top_k: int, weighing: Weighing) -> tuple[Tensor, float]:
    """Apply one block to one sequence; return also by how much the least clear choice was made."""
    mixed_SD = torch.tanh(causal_mean(h_SD) @ parameters["mix_in", None].T) @ parameters["mix_out", None].T  # (S, D)
    h_SD = h_SD + mixed_SD
    logits_SE = h_SD @ parameters["router", None].T  # (S, E)
    margin_S = routes.margins(logits_SE.detach(), top_k=top_k, score=weighing.score)
    ids_SK = routes.route(logits_SE.detach(), top_k=top_k, score=weighing.score).ids_TK
    w_SK = routes.weights(logits_SE, ids_SK, score=weighing.score, normalise=weighing.normalise, scale=weighing.scale)
    experts = swiglu_experts({(name, e): value for (name, e), value in parameters.items() if e is not None})
    score = parameters.get(("shared_score", None))
    factor_S1 = gate_factors(h_SD, None if score is None else score[0])[:, None]  # (S, 1)
    moe_SD = forward(h_SD, ids_SK, w_SK, experts) + factor_S1 * shared_part(h_SD, shared_of(parameters))  # (S, D)
    return h_SD + moe_SD, float(margin_S.min()) if len(margin_S) else torch.inf


def gradients(
    sequences: Sequence[Tensor], upstream: Sequence[Tensor], blocks: Sequence[Block], top_k: int, weighing: Weighing
) -> ModelGradients:
    """Run the model on every sequence (S, D) and take dL/dy back, by autograd.

    Rule: parameters get the sum over all sequences. A trainer that averages over dp * cp ranks divides it by that.

    Degenerate: a sequence of no tokens adds nothing.

    Decides: GROUP-07. Source: chain rule.

    >>> one = torch.ones(1, 1)
    >>> keys = ("mix_in", None), ("mix_out", None), ("router", None), ("gate", 0), ("up", 0), ("down", 0)
    >>> g = gradients([one], [one], [dict.fromkeys(keys, one)], 1, Weighing("softmax"))
    >>> h = 1 + torch.tanh(torch.tensor(1.0).double())
    >>> torch.allclose(g.y[0], h + h * h * h.sigmoid())
    True
    """
    xs = [_leaf(x_SD) for x_SD in sequences]
    ps = [{key: _leaf(value) for key, value in each.items()} for each in blocks]
    ys, margin = [], torch.inf
    for h_SD in xs:
        for parameters in ps:
            h_SD, clear = block(h_SD, parameters, top_k, weighing)
            margin = min(margin, clear)
        ys.append(h_SD)
    leaves = [*xs, *(value for each in ps for value in each.values())]
    # Of a sum, not of `ys` with their upstream: autograd would import sympy to compare shapes, for a second.
    loss = torch.stack([(y_SD * dy_SD.double()).sum() for y_SD, dy_SD in zip(ys, upstream, strict=True)]).sum()
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    dx = tuple(next(found) for _ in xs)
    dp = tuple({key: next(found) for key in each} for each in ps)
    return ModelGradients(tuple(y.detach() for y in ys), dx, dp, margin)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().double().clone().requires_grad_()
