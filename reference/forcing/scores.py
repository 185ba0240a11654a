"""What forcing leaves of the scores: the weights of forced ids, and what losses and gradients see.

A strategy that forces ids has them weighed by the router's own logits. One that forces logits hands their
gradient straight through to the router's own.

Sources: behaviour of torchtitan's forced load balance (ids) and Megatron-Core's (logits); Bengio et al.
2013 (straight through).
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.forcing.routes import legal_ids
from moe_conformance.reference.routing.routes import Score, weights
from moe_conformance.reference.routing.selection import select


class LossView(NamedTuple):
    """What a loss may be taken of: the logits of its scores and z-term (T, E), and the ids it counts (T, K)."""

    logits_TE: Tensor
    ids_TK: Tensor


def undecided_weights(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Mark the tokens whose forced logits are all -inf, bool (T,): there any finite weights are allowed.

    Source: arithmetic, 0 / 0.

    >>> undecided_weights(torch.tensor([[0.0, -torch.inf]] * 2), torch.tensor([[0], [1]])).tolist()
    [False, True]
    """
    if not bool(legal_ids(ids_TK, logits_TE.shape[1]).all()):
        raise ValueError(f"a token's forced ids are not different experts of {logits_TE.shape[1]}: {ids_TK.tolist()}")
    return (logits_TE.gather(1, ids_TK) == -inf).all(dim=1)  # (T,)


def forced_weights(
    logits_TE: Tensor, ids_TK: Tensor, *, score: Score, normalise: bool = False, scale: float = 1.0
) -> Tensor:
    """Weigh forced ids by the router's own logits, (T, E), int64 (T, K) -> (T, K), differentiable in the logits.

    Rule: `routing.weights`, as if the ids had been chosen; "softmax_topk" runs over the K forced logits.

    Degenerate: an expert at -inf has weight 0, and if all K of a token do, all weigh 0 with gradient 0; see
    `undecided_weights`. NaN and +inf raise, and ids that are no route.

    Decides: FORCE-05. Source: behaviour of torchtitan (scores gathered at the forced ids).

    >>> logits = torch.tensor([[5.0, 0.0, 0.0, -torch.inf], [5.0, 0.0, -torch.inf, -torch.inf]])
    >>> forced_weights(logits, torch.tensor([[1, 2], [2, 3]]), score="softmax_topk", scale=3.0).tolist()
    [[1.5, 1.5], [0.0, 0.0]]
    """
    undecided_T1 = undecided_weights(logits_TE, ids_TK)[:, None]  # (T, 1)
    l_TE = torch.where(undecided_T1 & (logits_TE == -inf), 0.0, logits_TE.double())  # (T, E); any finite logit
    w_TK = weights(l_TE, ids_TK, score=score, normalise=normalise, scale=scale)  # (T, K)
    return torch.where(undecided_T1, 0.0, w_TK)  # (T, K)


def straight_through(own_TE: Tensor, forced_TE: Tensor) -> Tensor:
    """Replace logits by forced ones, (T, E), and hand the gradient of these to the replaced, unchanged.

    Rule: z forward, dL/dl = dL/dz backward. The forced logits themselves get none; T = 0 gives (0, E).

    Decides: FORCE-07. Source: Bengio et al. 2013 (straight-through estimator).

    >>> own, forced = torch.ones(1, 3, requires_grad=True), torch.tensor([[0.5, 2.0, -1.0]])
    >>> z = straight_through(own, forced)
    >>> z.tolist(), torch.autograd.grad((z**2).sum(), own)[0].tolist()
    ([[0.5, 2.0, -1.0]], [[1.0, 4.0, -2.0]])
    """
    if own_TE.shape != forced_TE.shape:
        raise ValueError(f"own logits {tuple(own_TE.shape)}, forced {tuple(forced_TE.shape)}: give one each")
    z_TE: Tensor = _StraightThrough.apply(own_TE.double(), forced_TE.detach().double())  # type: ignore[no-untyped-call]
    return z_TE


def loss_views(
    own_TE: Tensor,
    *,
    top_k: int,
    forced_logits_TE: Tensor | None = None,
    forced_ids_TK: Tensor | None = None,
) -> tuple[LossView, ...]:
    """List what the losses may legally be taken of, given either forced logits or forced ids.

    Rule: logits forced, (z, top-K of z) or (l, top-K of l); ids forced, (l, top-K of l) or (l, forced ids):
    scores and z-term are always those of the logits that are counted, or the router's own. The losses of
    forced logits reach l straight through. Near ties of a top-K are free, as ever.

    Decides: FORCE-16. Source: Switch Transformer section 2.2 equation 4; behaviour of Megatron-Core.

    >>> own, dealt = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0]])
    >>> [(view.logits_TE.tolist(), view.ids_TK.tolist()) for view in loss_views(own, top_k=1, forced_ids_TK=dealt)]
    [([[1.0, 2.0, 3.0]], [[2]]), ([[1.0, 2.0, 3.0]], [[0]])]
    >>> [view.ids_TK.tolist() for view in loss_views(own, top_k=1, forced_logits_TE=-own)]
    [[[0]], [[2]]]
    """
    if (forced_logits_TE is None) == (forced_ids_TK is None):
        raise ValueError("give either forced logits or forced ids")
    own = LossView(own_TE.double(), select(own_TE, top_k=top_k))
    if forced_ids_TK is not None:
        if forced_ids_TK.shape != own.ids_TK.shape or not bool(legal_ids(forced_ids_TK, own_TE.shape[1]).all()):
            raise ValueError(f"forced ids are not {top_k} different experts for each token: {forced_ids_TK.tolist()}")
        return own, LossView(own_TE.double(), forced_ids_TK)
    assert forced_logits_TE is not None
    z_TE = straight_through(own_TE, forced_logits_TE)  # (T, E)
    return LossView(z_TE, select(z_TE, top_k=top_k)), own


class _StraightThrough(torch.autograd.Function):
    """The forced logits forward, the gradient to the router's own backward."""

    @staticmethod
    def forward(ctx: Any, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        return forced_TE.clone()

    @staticmethod
    def backward(ctx: Any, *dz_TE: Tensor) -> tuple[Tensor, None]:
        return dz_TE[0], None
