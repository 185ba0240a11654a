"""Gradients of the layer with shared experts, of one batch and over all ranks.

Autograd through `shared_experts.forward`: nothing here is a formula of its own but the divisor.

Sources: chain rule; data parallelism: the gradient of a sum is the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference import layer
from reference.experts import Expert, Parameters
from reference.layer import Batch, WeightsAt
from reference.shared_experts import SharedExpert, forward


@dataclass(frozen=True)
class SharedGradients:
    """What comes out, in float64: y, and the gradients; None where there is no such parameter."""

    y_TD: Tensor
    dx_TD: Tensor
    dweights_TK: Tensor
    parameters: Mapping[tuple[str, int], Tensor]  # of the routed experts
    shared: tuple[SharedExpert, ...]
    gate_D: Tensor | None


def gradients(
    batch: Batch,
    build: Callable[[Parameters], Expert],
    parameters: Parameters,
    shared: Sequence[SharedExpert],
    *,
    gate_D: Tensor | None = None,
    weights_at: WeightsAt = "output",
) -> SharedGradients:
    """Compute the output and, given dL/dy, the gradient of L in x, weights and every parameter.

    Rule: autograd through `forward`. The gradient of a token is the sum of what comes back through its routed
    experts, through the shared ones and through the gate. `build` and `parameters` as in `layer.gradients`.

    Degenerate: a token of only empty slots has the shared part of dL/dx alone. T = 0 gives empty and zero
    gradients, which are returned and never left out; what does not exist (bias, gate) has None.

    Raises:
        ValueError: as `forward`.

    Decides: SHARE-03, SHARE-04. Source: chain rule.

    >>> ones = SharedExpert(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(2, 1), torch.ones(2))
    >>> batch = Batch(torch.ones(1, 2), torch.tensor([[-1]]), torch.ones(1, 1), torch.tensor([[2.0, 6.0]]))
    >>> g = gradients(batch, lambda p: lambda rows, e: rows, {}, [ones], gate_D=torch.zeros(2))
    >>> g.y_TD.tolist(), g.shared[0].bias_D.tolist(), g.gate_D.tolist()
    ([[0.5, 0.5]], [1.0, 3.0], [2.0, 2.0])
    """
    x, w = _leaf(batch.x_TD), _leaf(batch.weights_TK)
    p = {name: _leaf(value) for name, value in parameters.items()}
    h = [_each(_leaf, each) for each in shared]
    v = None if gate_D is None else _leaf(gate_D)
    y_TD = forward(x, batch.ids_TK, w, build(p), h, gate_D=v, weights_at=weights_at)  # (T, D)
    if not y_TD.requires_grad:  # nothing was routed and nothing is shared: every gradient is zero
        y_TD.requires_grad_()

    leaves = [x, w, *p.values(), *(value for each in h for value in each if value is not None)]
    leaves += [] if v is None else [v]
    found = iter(torch.autograd.grad(y_TD, leaves, batch.dy_TD.double(), allow_unused=True, materialize_grads=True))
    return SharedGradients(
        y_TD=y_TD.detach(),
        dx_TD=next(found),
        dweights_TK=next(found),
        parameters={name: next(found) for name in p},
        shared=tuple(_each(lambda _: next(found), each) for each in h),
        gate_D=None if v is None else next(found),
    )


def global_gradients(
    batches: Sequence[Batch],
    build: Callable[[Parameters], Expert],
    parameters: Parameters,
    shared: Sequence[SharedExpert],
    *,
    gate_D: Tensor | None = None,
    weights_at: WeightsAt = "output",
    divisor: int = 1,
) -> SharedGradients:
    """Compute every parameter's gradient over the tokens of all ranks, and y, dL/dx and dL/dweights of them all.

    Args:
        batches: what the ranks hold, every distinct token once: of copies over tp, give one.
        build: as in `layer.gradients`.
        parameters: of the routed experts, by (name, global expert id).
        shared: S shared experts.
        gate_D: v, or None.
        weights_at: as in `layer.forward`.
        divisor: dp * cp where the backend averages, else 1; never ep, etp or edp.

    Rule: `gradients` of the global batch; parameter gradients, routed and shared alike, over the divisor.

    Degenerate: a rank with T = 0 adds nothing, and holds the same gradients as all others.

    Raises:
        ValueError: no batch, a divisor below 1, and as `forward`.

    Decides: SHARE-05. Source: data parallelism: the gradient of a sum is the sum of gradients.

    >>> ones = SharedExpert(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(2, 1), torch.ones(2))
    >>> def rank(dy):
    ...     T = len(dy)
    ...     return Batch(torch.ones(T, 2), torch.full((T, 1), -1), torch.ones(T, 1), torch.tensor(dy))
    >>> ranks = [rank([[1.0, 2.0]]), rank([[3.0, 4.0], [5.0, 6.0]])]
    >>> g = global_gradients(ranks, lambda p: lambda rows, e: rows, {}, [ones], divisor=3)
    >>> g.shared[0].bias_D.tolist()
    [3.0, 4.0]
    """
    if not batches or divisor < 1:
        raise ValueError(f"{len(batches)} ranks, divisor {divisor}: need at least one rank and a divisor >= 1")
    whole = gradients(layer.global_batch(batches), build, parameters, shared, gate_D=gate_D, weights_at=weights_at)
    return replace(
        whole,
        parameters={name: value / divisor for name, value in whole.parameters.items()},
        shared=tuple(_each(lambda value: value / divisor, each) for each in whole.shared),
        gate_D=None if whole.gate_D is None else whole.gate_D / divisor,
    )


def _each(change: Callable[[Tensor], Tensor], expert: SharedExpert) -> SharedExpert:
    """Change every parameter that the expert has, in the order of the record."""
    gate, up, down = change(expert.gate_FD), change(expert.up_FD), change(expert.down_DF)
    return SharedExpert(gate, up, down, None if expert.bias_D is None else change(expert.bias_D))


def _leaf(value: Tensor) -> Tensor:
    """Copy a tensor to a float64 leaf, so that the caller's own graph and gradients stay as they are."""
    return value.detach().double().clone().requires_grad_()
