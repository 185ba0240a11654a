"""Copies over tp: ranks of a tensor parallel group that hold the same tokens, each of which counts once.

Every copy has a routing, the same, and the exchange groups of the copies may be one or several. Who sends a
pair is free. What matters is that in no exchange group an expert answers it twice, in one at least it does,
and that every copy ends with the whole output.

Sources: DeepSpeed-TED (Singh et al. 2023; duplicate token dropping); Narayanan et al. 2021 (tensor parallelism).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.reference.exchange.deliveries import Pair


def copies_agree(ids_by_rank: Sequence[Tensor], tp_groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of every tp group have the same routing, int64 (T, K) each.

    Degenerate: groups of one rank agree with themselves.

    Decides: EXCH-37. Source: behaviour of DeepSpeed (check of inputs that must agree).

    >>> copies_agree([torch.tensor([[2, 0]]), torch.tensor([[0, 2]])], [[0, 1]])
    False
    """
    return all(torch.equal(ids_by_rank[group[0]], ids_by_rank[rank]) for group in tp_groups for rank in group)


def wrong_pairs(
    ids_by_rank: Sequence[Tensor],
    delivered: Sequence[Pair],
    exchange_groups: Sequence[Sequence[int]],
    local_experts: Sequence[Sequence[int]],
    tp_groups: Sequence[Sequence[int]],
) -> tuple[tuple[int, int, int], ...]:
    """List what was not delivered once: (lowest rank of the tp group, token, slot), ascending.

    Args:
        ids_by_rank: of every rank, int64 (T, K), the same within a tp group.
        delivered: what the experts received, by the copy that sent it.
        exchange_groups: of every group, its ranks.
        local_experts: of every rank, the experts of which it holds all or a shard.
        tp_groups: of every group, its ranks.

    Rule: over all copies in one exchange group, each owner of the expert there gets the pair at most once; in one
    of these groups at least, every owner exactly once; no other rank receives it.

    Degenerate: an empty slot, or one that does not exist, is wrong if it is delivered. tp = 1 leaves each
    pair to be delivered to all its owners.

    Raises:
        ValueError: routings that differ within a tp group, a rank that is not in one group of each kind,
            a row from a rank that does not exist.

    Decides: EXCH-35. Source: DeepSpeed-TED (duplicate token dropping).

    >>> ids, local, tp = [torch.tensor([[1], [0]])] * 2, [[0], [1]], [[0, 1]]
    >>> once = [Pair(0, 0, 0, 1, 1), Pair(1, 1, 0, 0, 0)]
    >>> wrong_pairs(ids, once, [[0, 1]], local, tp), wrong_pairs(ids, [*once, Pair(1, 0, 0, 1, 1)], [[0, 1]], local, tp)
    ((), ((0, 0, 0),))
    """
    if not copies_agree(ids_by_rank, tp_groups):
        raise ValueError("ranks of a tp group have different routings: they hold no copies")
    W = len(ids_by_rank)
    for kind, groups in (("tp", tp_groups), ("exchange", exchange_groups)):
        if sorted(rank for group in groups for rank in group) != list(range(W)):
            raise ValueError(f"{kind} groups {[list(group) for group in groups]}: each of {W} ranks is in one")
    if any(pair.source not in range(W) for pair in delivered):
        raise ValueError(f"a row comes from a rank that is none of {W}")
    group_of = {rank: g for g, group in enumerate(exchange_groups) for rank in group}
    wrong: set[tuple[int, int, int]] = set()
    for tp_group in tp_groups:
        first, ids_TK = min(tp_group), ids_by_rank[tp_group[0]]
        got: dict[tuple[int, int], Counter[tuple[int, int, int]]] = {}  # of every slot, (group, expert, destination)
        for pair in delivered:
            if pair.source in tp_group:
                rows = got.setdefault((pair.token, pair.slot), Counter())
                rows[group_of[pair.source], pair.expert, pair.destination] += 1
        routed = {(t, k): e for t, ids_K in enumerate(ids_TK.tolist()) for k, e in enumerate(ids_K) if e >= 0}
        for at in {*got, *routed}:
            rows = got.get(at, Counter())
            once = []  # of every exchange group, a row for each owner there
            for g in {group_of[rank] for rank in tp_group}:
                owners = [rank for rank in exchange_groups[g] if at in routed and routed[at] in local_experts[rank]]
                once.append(Counter((g, routed[at], rank) for rank in owners))
            whole = [wanted for wanted in once if wanted and wanted <= rows]
            if at not in routed or not whole or not rows <= sum(once, Counter()):
                wrong.add((first, *at))
    return tuple(sorted(wrong))


def same_bytes(copies: Sequence[Tensor]) -> bool:
    """Return whether copies are the same: dtype, shape and every bit, so that -0 is not 0 and a NaN is itself.

    Raises:
        ValueError: no copy.

    Decides: EXCH-36. Source: Narayanan et al. 2021 (replicated activations).

    >>> nan = torch.tensor([torch.nan])
    >>> same_bytes([nan, nan.clone()]), same_bytes([torch.tensor([0.0]), torch.tensor([-0.0])])
    (True, False)
    """
    if not copies:
        raise ValueError("no copies to compare")
    made = [(each.dtype, each.shape, each.contiguous().reshape(-1).view(torch.uint8)) for each in copies]
    return all(each[:2] == made[0][:2] and torch.equal(each[2], made[0][2]) for each in made)


def gathered(by_copy: Sequence[Tensor], declared: Literal["complete", "parts"]) -> tuple[Tensor, ...]:
    """Return what has to be the gradient of the one token, float64: every copy's, or the sum of all.

    Args:
        by_copy: dL/dx or dL/dw of the copies, each of which was given dL/dy.
        declared: what the backend says that the copies' gradients are.

    Raises:
        ValueError: no copy, shapes that differ, another word.

    Decides: EXCH-36. Source: Narayanan et al. 2021 (the adjoint of a copy is a sum).

    >>> [whole.tolist() for whole in gathered([torch.tensor([1.0]), torch.tensor([2.0])], "parts")]
    [[3.0]]
    """
    if not by_copy or declared not in ("complete", "parts") or len({each.shape for each in by_copy}) > 1:
        raise ValueError(f"{len(by_copy)} copies that are {declared!r}: need copies of one shape, complete or parts")
    if declared == "complete":
        return tuple(each.double() for each in by_copy)
    return (torch.stack([each.double() for each in by_copy]).sum(dim=0),)
