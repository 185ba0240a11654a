"""After the drop: what becomes of the slots that were kept, and of the others.

A dropped slot is an empty slot of the layer, of weight 0: it adds nothing to the output, and gets and gives
no gradient. Which slots are kept is `capacity_drops.py`'s, and has no gradient itself.

Sources: Switch Transformer section 2.2 (dropped tokens pass on through the residual connection); behaviour
of Megatron-Core and DeepSpeed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.routing.routes import Routed


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


def check_kept(kept_TK: Tensor, ids_TK: Tensor) -> None:
    """Raise unless `kept` is a bool for every slot, False for empty ones."""
    if kept_TK.shape != ids_TK.shape or kept_TK.dtype != torch.bool:
        raise ValueError(f"kept is {kept_TK.dtype} {tuple(kept_TK.shape)}; give bool {tuple(ids_TK.shape)}")
    if bool((kept_TK & (ids_TK < 0)).any()):
        raise ValueError("an empty slot (-1) is marked as kept: it chose no expert")
