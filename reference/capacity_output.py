"""After the drop: what becomes of the slots that were kept, and of the others.

A dropped slot is an empty slot of the layer, of weight 0: it adds nothing to the output, and gets and gives
no gradient. Which slots are kept is `capacity_drops.py`'s, and has no gradient itself.

Sources: Switch Transformer section 2.2 (dropped tokens pass on through the residual connection); behaviour
of Megatron-Core and DeepSpeed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import layer
from reference.experts import Expert
from reference.routing import Routed


def after_drop(
    ids_TK: Tensor, weights_TK: Tensor, kept_TK: Tensor, *, renormalise: bool = False, scale: float = 1.0
) -> Routed:
    """Empty the dropped slots, (T, K) each -> ids -1 and weights 0 there, differentiable in the weights.

    Rule: kept weights stay as they are; or, if `renormalise`, become scale * w_tk / (sum of the kept of t).

    Degenerate: a token of nothing kept, or of kept weights that sum to 0, has weight 0 with gradient 0. All
    kept and normalised before: no change. Raises on a slot kept though empty, and on a scale without
    `renormalise`: the weights already have it.

    Decides: DROP-09, DROP-11. Source: behaviour of Megatron-Core (as they are), DeepSpeed (renormalised).

    >>> w = torch.tensor([[0.5, 0.25, 0.25]])
    >>> ids, kept = torch.tensor([[4, 0, 3]]), torch.tensor([[True, False, True]])
    >>> dropped = after_drop(ids, w, kept)
    >>> dropped.ids_TK.tolist(), dropped.weights_TK.tolist()
    ([[4, -1, 3]], [[0.5, 0.0, 0.25]])
    >>> after_drop(ids, w, kept, renormalise=True, scale=3.0).weights_TK.tolist()
    [[2.0, 0.0, 1.0]]
    """
    check_kept(kept_TK, ids_TK)
    if weights_TK.shape != ids_TK.shape:
        raise ValueError(f"weights {tuple(weights_TK.shape)} for ids {tuple(ids_TK.shape)}: give one each")
    if scale != 1.0 and not renormalise:
        raise ValueError(f"scale {scale} without renormalise: the weights already have it")
    w_TK = torch.where(kept_TK, weights_TK.double(), 0.0)  # (T, K)
    if renormalise:
        sum_T1 = w_TK.sum(dim=1, keepdim=True)  # (T, 1)
        w_TK = torch.where(sum_T1 != 0, scale * w_TK / torch.where(sum_T1 != 0, sum_T1, 1.0), 0.0)  # (T, K)
    return Routed(torch.where(kept_TK, ids_TK, -1), w_TK)


def output(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    kept_TK: Tensor,
    expert: Expert,
    *,
    renormalise: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Compute what the routed experts add, (T, D) -> (T, D), differentiable in x, weights and experts.

    Rule: y_t = sum over kept k of w_tk f_{e_tk}(x_t). Autograd gives zeros to a dropped slot's weight, and
    leaves it out of its token's and expert's gradients. Padding to capacity changes none of this.

    Degenerate: a token of nothing kept gives exactly 0, and gets gradient 0; its residual and shared parts
    are the caller's. The scores below `weights_TK` may still feel a dropped slot: a normalisation before
    the drop has its score in the sum.

    Decides: DROP-04, DROP-09, DROP-10, DROP-11, DROP-12. Source: Switch Transformer section 2.2; chain rule.

    >>> x, ids, w = torch.ones(2, 3), torch.tensor([[0, 1], [1, 0]]), torch.full((2, 2), 0.5).requires_grad_()
    >>> kept = torch.tensor([[True, False], [False, False]])
    >>> y = output(x, ids, w, kept, lambda rows, e: rows + e)
    >>> y.tolist(), torch.autograd.grad(y.sum(), w)[0].tolist()
    ([[0.5, 0.5, 0.5], [0.0, 0.0, 0.0]], [[3.0, 0.0], [0.0, 0.0]])
    """
    dropped = after_drop(ids_TK, weights_TK, kept_TK, renormalise=renormalise, scale=scale)
    y_TD = layer.forward(x_TD, dropped.ids_TK, dropped.weights_TK, expert)  # (T, D)
    # Where nothing at all is kept, the layer never saw x and the weights: their gradients are 0, not absent.
    never = torch.zeros((), dtype=torch.bool)
    x_TD, sum_T1 = x_TD.double(), dropped.weights_TK.sum(dim=1, keepdim=True)  # (T, D), (T, 1)
    return y_TD + torch.where(never, x_TD, 0.0) + torch.where(never, sum_T1, 0.0)  # (T, D)


def check_kept(kept_TK: Tensor, ids_TK: Tensor) -> None:
    """Raise unless `kept` is a bool for every slot, False for empty ones."""
    if kept_TK.shape != ids_TK.shape or kept_TK.dtype != torch.bool:
        raise ValueError(f"kept is {kept_TK.dtype} {tuple(kept_TK.shape)}; give bool {tuple(ids_TK.shape)}")
    if bool((kept_TK & (ids_TK < 0)).any()):
        raise ValueError("an empty slot (-1) is marked as kept: it chose no expert")
