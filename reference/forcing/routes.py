"""Forcing: routes that a strategy decides instead of the scores, for benchmarks.

Here: what is a route at all, balanced routes, and the names of strategies. Hot ranks, nodes and
experts are in `hot.py`, random routes in `draws.py`, weights and gradients in `scores.py`, the mean load of the
busiest rank in `imbalance.py`; the loads are `capacity.loads` of the forced ids.

Sources: behaviour of torchtitan's forced load balance and Megatron-Core's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STRATEGIES = "random", "biased", "round_robin", "worst_rank", "one_expert", "one_node", "alternating", "ratio"


def legal_ids(ids_TK: Tensor, experts: int, *, padding_T: Tensor | None = None) -> Tensor:
    """Say of each token whether its ids are a route, int64 (T, K) -> bool (T,).

    Rule: K different ids in 0..E-1. A token that `padding_T`, bool (T,), marks True may instead have nothing
    but empty slots (-1), not a mixture.

    Decides: FORCE-02, ROUTE-01, ROUTE-22. Source: definition of top-K routing.

    >>> ids, padding = torch.tensor([[2, 0], [1, 1], [3, 0], [-1, -1]]), torch.tensor([False] * 3 + [True])
    >>> legal_ids(ids, 3).tolist(), legal_ids(ids, 3, padding_T=padding).tolist()
    ([True, False, False, False], [True, False, False, True])
    """
    padding = [False] * len(ids_TK) if padding_T is None else padding_T.tolist()
    if len(padding) != len(ids_TK):
        raise ValueError(f"a padding mask of {len(padding)} for {len(ids_TK)} tokens")
    legal = []
    for ids_K, is_padding in zip(ids_TK.tolist(), padding, strict=True):
        routed = len(set(ids_K)) == len(ids_K) and set(ids_K) <= set(range(experts))
        legal.append(routed or (is_padding and set(ids_K) == {-1}))
    return torch.tensor(legal, dtype=torch.bool)  # (T,)


def balanced(loads_E: Tensor) -> bool:
    """Return whether one rank's loads, int64 (E,), differ by at most one.

    Decides: FORCE-03. Source: arithmetic, as even as K T choices of E experts can be.

    >>> balanced(torch.tensor([2, 1, 2])), balanced(torch.tensor([3, 1, 2]))
    (True, False)
    """
    return int(loads_E.max() - loads_E.min()) <= 1


def balanced_sum(loads_by_rank: Sequence[Tensor]) -> bool:
    """Return whether the sum over source ranks of their loads, int64 (E,) each, is as even as it must be.

    Rule: its largest and smallest load differ by at most 1 if all ranks have as many tokens, and by at most
    the number of ranks if not. Raises on no rank.

    Decides: FORCE-04. Source: arithmetic, equal starts give every remainder to the same experts.

    >>> one, two = torch.tensor([2, 2, 1, 1]), torch.tensor([1, 1, 2, 2])
    >>> balanced_sum([one, two]), balanced_sum([one, one]), balanced_sum([one, torch.tensor([1, 0, 0, 0])])
    (True, False, True)
    """
    if not loads_by_rank:
        raise ValueError("no rank's loads to add up")
    sum_E = torch.stack(list(loads_by_rank)).sum(dim=0)  # (E,)
    equal = len({int(loads_E.sum()) for loads_E in loads_by_rank}) == 1
    return int(sum_E.max() - sum_E.min()) <= (1 if equal else len(loads_by_rank))


def groups_used(ids_TK: Tensor, experts: int, groups: int) -> Tensor:
    """Count the groups of E / G neighbours that each token's experts lie in, int64 (T, K) -> int64 (T,).

    Rule: with forced logits at most the selected number of groups; ids are forced whatever their groups.

    Decides: FORCE-18. Source: DeepSeek-V2 section 2.2.2; behaviour of Megatron-Core and torchtitan.

    >>> groups_used(torch.tensor([[0, 1], [1, 2]]), 6, 3).tolist()
    [1, 2]
    """
    if groups < 1 or experts % groups:
        raise ValueError(f"{groups} groups do not divide {experts} experts")
    if not bool(legal_ids(ids_TK, experts).all()):
        raise ValueError(f"a token's ids are not different experts of {experts}")
    used = [len({e // (experts // groups) for e in ids_K}) for ids_K in ids_TK.tolist()]
    return torch.tensor(used, dtype=torch.int64)  # (T,)
