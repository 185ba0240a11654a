"""Non-finite tokens: logits of NaN or +inf, which have no correct result, beside tokens that have one.

A router may raise an error. If it does not, the weights of the non-finite token are free, but its expert ids must be
in range, and the routes of the other tokens must not change.

Source: behaviour of SGLang's fused top-k; an id out of range reads or writes memory out of bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.routing.routes import Routed


def bad_tokens(logits_TE: Tensor) -> Tensor:
    """Mark the tokens with a logit of NaN or +inf, (T, E) -> bool (T,).

    Decides: ROUTE-15. Source: definition.

    >>> bad_tokens(torch.tensor([[0.0, -torch.inf], [torch.inf, 0.0], [0.0, torch.nan]])).tolist()
    [False, True, True]
    """
    return (logits_TE.isnan() | (logits_TE == torch.inf)).any(dim=1)  # (T,)


def legal_ids_beside_bad(ids_TK: Tensor, experts: int) -> Tensor:
    """Return for every token whether its ids are valid, int64 (T, K) -> bool (T,).

    Rule: each in 0..E-1, and no expert twice in a token; or -1, an empty slot, any number of times.

    Decides: ROUTE-15. Source: an id out of range reads or writes memory out of bounds.

    >>> legal_ids_beside_bad(torch.tensor([[-1, 2, -1], [2, 0, 2], [3, 0, 1]]), 3).tolist()
    [True, False, False]
    """
    legal = []
    for ids_K in ids_TK.tolist():
        named = [e for e in ids_K if e != -1]
        legal.append(len(set(named)) == len(named) and set(named) <= set(range(experts)))
    return torch.tensor(legal, dtype=torch.bool)  # (T,)


def unmoved(
    logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, without: Routed, *, rounding: float = 2.0**-20
) -> Tensor:
    """Say of every token whether bad tokens left its route alone, (T, K) each -> bool (T,).

    Args:
        logits_TE: what was routed, bad tokens included.
        ids_TK: the ids of all tokens.
        weights_TK: their weights.
        without: ids and weights, (G, K), of the G good tokens routed without the bad ones, in the same order.
        rounding: by which part of a weight it may differ.

    Rule: a good token has the same experts with the same weights, in any order of slots.

    Degenerate: a bad token is always unmoved, as its route is free. A NaN in a weight is never the same.

    Raises:
        ValueError: shapes that do not fit, another number of good tokens.

    Decides: ROUTE-15. Source: top-k routing is a function of one token.

    >>> logits, ids = torch.tensor([[torch.nan, 0.0], [2.0, 2.0]]), torch.tensor([[1, 0], [1, 0]])
    >>> alone = Routed(torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.5]]))
    >>> unmoved(logits, ids, torch.tensor([[torch.nan, 0.0], [0.5, 0.25]]), alone).tolist()
    [True, True]
    >>> unmoved(logits, ids, torch.tensor([[torch.nan, 0.0], [0.25, 0.5]]), alone).tolist()
    [True, False]
    """
    good_T = ~bad_tokens(logits_TE)  # (T,)
    shapes = [tuple(each.shape) for each in (ids_TK, weights_TK, without.ids_TK, without.weights_TK)]
    (T, K), G = ids_TK.shape, int(good_T.sum())
    if len(logits_TE) != T or shapes != [(T, K), (T, K), (G, K), (G, K)]:
        raise ValueError(f"ids and weights {shapes} for {len(logits_TE)} tokens, {G} of them good")
    same_T = torch.ones(T, dtype=torch.bool)  # (T,)
    for g, t in enumerate(good_T.nonzero()[:, 0].tolist()):
        here = sorted(zip(ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True))
        alone = sorted(zip(without.ids_TK[g].tolist(), without.weights_TK[g].tolist(), strict=True))
        same_T[t] = all(e == f and abs(w - v) <= rounding * abs(v) for (e, w), (f, v) in zip(here, alone, strict=True))
    return same_T
