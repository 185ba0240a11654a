"""Scaling of losses: what the losses of the microbatches of a step add to finished gradients.

A table `of[m][d]` holds one entry for every microbatch m = 1..M and data parallel group d = 1..dp. A global loss
is one loss for all groups: its tables have one column.

Source: linearity of gradients. A mean is over equal shares, so no factor of tp, cp, ep or their inverse is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]
"""Logits (T, E), float64 -> a loss (), e.g. a function of `losses.py` with all else given."""


def attached_gradient(
    logits_TE: Tensor,
    weigh: Callable[[Tensor], Tensor],
    upstream_TK: Tensor,
    losses: Sequence[Loss],
    *,
    scale: float = 1.0,
) -> Tensor:
    """Give the gradient of logits on whose weights losses ride, float64 (T, E).

    Rule (LOSS-10, LOSS-17): J^T u + s sum_i dL_i/dl, with J the derivative of `weigh` (logits (T, E) -> weights
    (T, K)), u the upstream gradient of the weights and s the backward scale. The losses are added once,
    whatever u is, and do not change the weights.

    Degenerate: s = 0 or no losses: J^T u itself. u = 0: the losses alone.

    Decides: LOSS-10, LOSS-17. Source: linearity of gradients.

    >>> logits, upstream = torch.tensor([[2.0, 3.0]]), torch.tensor([[10.0]])
    >>> square = lambda l: (l**2).sum()
    >>> attached_gradient(logits, lambda l: 7 * l[:, :1], upstream, [square, square], scale=0.5).tolist()
    [[74.0, 6.0]]
    """
    leaf_TE = logits_TE.detach().double().clone().requires_grad_()  # (T, E)
    total_TE = _gradient(weigh(leaf_TE), leaf_TE, upstream_TK.double())  # (T, E)
    for loss in losses if scale != 0 else ():
        total_TE = total_TE + scale * _gradient(loss(leaf_TE), leaf_TE, torch.ones((), dtype=torch.float64))
    return total_TE


def router_gradients(x_TD: Tensor, router_ED: Tensor, dlogits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the gradient of the logits l = x W^T to the router's input and parameters, -> (T, D), (E, D).

    Rule (LOSS-04): dL/dx_t = sum_e dL/dl_te W_e, dL/dW_e = sum_t dL/dl_te x_t.

    Decides: LOSS-04. Source: chain rule.

    >>> x, router = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [gradient.tolist() for gradient in router_gradients(x, router, torch.tensor([[10.0, 5.0]]))]
    [[[10.0, 5.0, 0.0]], [[10.0, 20.0, 30.0], [5.0, 10.0, 15.0]]]
    """
    (T, D), E = x_TD.shape, len(router_ED)
    if router_ED.shape != (E, D) or dlogits_TE.shape != (T, E):
        shapes = [tuple(each.shape) for each in (x_TD, router_ED, dlogits_TE)]
        raise ValueError(f"shapes {shapes} are not (T, D), (E, D) and (T, E)")
    return dlogits_TE.double() @ router_ED.double(), dlogits_TE.double().T @ x_TD.double()


def mean_gradient(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Finish gradients of microbatch losses in the mean convention, of[m][d] (...) -> (...).

    Rule (LOSS-11): (1 / (M dp)) sum_m sum_d grad L^{m,d}; for the global loss (1 / M) sum_m grad L_m (LOSS-08).
    So equal numbers of sequences may be cut into microbatches in any way (LOSS-06).

    Degenerate: a group without tokens brings zeros and counts. An empty or ragged table is an error.

    Decides: LOSS-11. Source: arithmetic.

    >>> mean_gradient([[torch.tensor(1.0), torch.tensor(2.0), torch.tensor(9.0)]]).item()
    4.0
    """
    return _stacked(gradients).mean(dim=0)


def sum_gradient(gradients: Sequence[Sequence[Tensor]], *, scale: float) -> Tensor:
    """Finish gradients of microbatch losses in the sum convention, of[m][d] (...) -> (...).

    Rule (LOSS-11, LOSS-08): s sum_m sum_d grad L^{m,d}, s the backward scale that the backend declares.

    >>> sum_gradient([[torch.tensor(1.0)], [torch.tensor(2.0)]], scale=0.5).item()
    1.5
    """
    return scale * _stacked(gradients).sum(dim=0)


def token_gradient(gradients: Sequence[Sequence[Tensor]], valid: Sequence[Sequence[int]]) -> Tensor:
    """Finish gradients of microbatch losses that are divided by the tokens of the step, of[m][d] (...) -> (...).

    Rule (LOSS-13, GRAD-14): sum_{m,d} V^{m,d} grad L^{m,d} / sum_{m,d} V^{m,d}, V the valid tokens of the whole tp x cp
    group; for the global loss V^m = sum_d V^{m,d}, in one column.

    Degenerate: all V equal is `mean_gradient`; all V = 0 gives 0, not NaN.

    Decides: LOSS-13. Source: arithmetic.

    >>> token_gradient([[torch.tensor(1.0), torch.tensor(5.0)]], [[3, 1]]).item()
    2.0
    """
    if [len(row) for row in valid] != [len(row) for row in gradients]:
        raise ValueError(f"numbers of valid tokens {valid} do not fit the table of gradients")
    numbers = [V for row in valid for V in row]
    if min(numbers, default=0) < 0:
        raise ValueError(f"numbers of valid tokens {numbers} hold a negative one")
    stacked = _stacked(gradients)  # (M dp, ...)
    total = torch.zeros_like(stacked[0])
    for V, gradient in zip(numbers, stacked, strict=True):
        total = total + V * gradient
    return total / max(sum(numbers), 1)


def _stacked(table: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack a rectangular table of gradients of one shape, -> (M dp, ...)."""
    columns = {len(row) for row in table}
    entries = [entry.double() for row in table for entry in row]
    if len(columns) != 1 or not entries or len({tuple(entry.shape) for entry in entries}) != 1:
        raise ValueError(f"rows of {sorted(columns)} gradients; give M >= 1 rows of dp >= 1, all of one shape")
    return torch.stack(entries)  # (M dp, ...)


def _gradient(value: Tensor, leaf: Tensor, upstream: Tensor) -> Tensor:
    """Differentiate, with zeros where the value does not depend on the leaf."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, upstream, allow_unused=True, materialize_grads=True)
    return gradient
