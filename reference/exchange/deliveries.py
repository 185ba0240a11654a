"""Exchange: which rows have to reach which rank.

A (token, slot) pair on a source rank is delivered, inside the exchange group of that rank (the ranks of one
ep x etp group), to every rank that holds its expert or a shard of it. Nothing is said about the order in
which rows arrive, about padding, or about how often a token is sent when several of its experts share a
rank: those are an implementation's choice.

Sources: GShard section 3 (dispatch to the expert's device), Switch Transformer section 2.2, MegaBlocks (no
row is dropped), MoE parallel folding (Liu et al. 2025: the expert shards of one group each get the row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """One delivery: slot `slot` of token `token` on rank `source` reaches `expert` on rank `destination`."""

    source: int
    token: int
    slot: int
    expert: int
    destination: int


def deliveries(
    ids_by_rank: Sequence[Tensor],
    exchange_groups: Sequence[Sequence[int]],
    local_experts: Sequence[Sequence[int]],
) -> tuple[Pair, ...]:
    """List every delivery, ordered by source, token, slot and destination.

    Args:
        ids_by_rank: of every rank, int64 (T, K) global expert ids, -1 = empty; T may differ between ranks.
        exchange_groups: of every group, its ranks; each rank is in exactly one.
        local_experts: of every rank, the global ids of the experts of which it holds all or a shard.

    Rule: every id >= 0 reaches each rank of its source's group that lists that expert, exactly once.
    Several ranks of a group that list one expert are its etp shards, and each needs the row. Redundant
    experts, replicas to choose one from, are not described: give every replica an id of its own.

    Degenerate: an empty slot, a rank without tokens (T = 0) and an expert without tokens make no pair. An
    expert in two slots of one token makes two. An expert that no rank of the group lists is an error, as it
    has nowhere to go.

    Decides: EXCH-01, EXCH-03, EXCH-04, EXCH-10, EXCH-22, EXCH-38, EXCH-39, FAST-05, FORCE-20, GRAD-01,
    GROUP-06, OVLP-13, PACK-03. Source: definition of dispatch.

    >>> import torch
    >>> ids = [torch.tensor([[2, 0]]), torch.tensor([[-1, 2], [1, -1]])]
    >>> for pair in deliveries(ids, [[0, 1]], [[0, 1], [2]]):
    ...     print(pair)
    Pair(source=0, token=0, slot=0, expert=2, destination=1)
    Pair(source=0, token=0, slot=1, expert=0, destination=0)
    Pair(source=1, token=0, slot=1, expert=2, destination=1)
    Pair(source=1, token=1, slot=0, expert=1, destination=0)
    """
    holders: dict[tuple[int, int], list[int]] = {}  # (index of group, expert) -> its ranks, ascending
    for g, group in enumerate(exchange_groups):
        for rank in sorted(group):
            for expert in local_experts[rank]:
                ranks = holders.setdefault((g, expert), [])
                if rank in ranks:
                    raise ValueError(f"rank {rank} lists expert {expert} twice: {list(local_experts[rank])}")
                ranks.append(rank)
    pairs = []
    for source, ids_TK in enumerate(ids_by_rank):
        g = _group_of(source, exchange_groups)
        for token, ids_K in enumerate(ids_TK.tolist()):
            for slot, expert in enumerate(ids_K):
                if expert == -1:
                    continue
                if (g, expert) not in holders:
                    at = f"rank {source} token {token} slot {slot}"
                    raise ValueError(f"{at}: no rank of {list(exchange_groups[g])} holds expert {expert}")
                pairs += [Pair(source, token, slot, expert, rank) for rank in holders[g, expert]]
    return tuple(pairs)


def _group_of(rank: int, exchange_groups: Sequence[Sequence[int]]) -> int:
    """Find the one exchange group that holds the rank."""
    found = [g for g, group in enumerate(exchange_groups) if rank in group]
    if len(found) != 1:
        raise ValueError(f"rank {rank} is in {len(found)} exchange groups of {exchange_groups}; it must be in one")
    return found[0]
