"""Cost: the rows of width D that a routing sends, from every rank to every other.

Counted in rows of tokens, without padding. A combine can send the same rows back, after adding up those of one
token, and a backward needs no more than its forward; so one count serves all four.

Source: arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moe_conformance.reference.exchange.deliveries import deliveries


def pair_rows(
    ids_by_rank: Sequence[Tensor], exchange_groups: Sequence[Sequence[int]], local_experts: Sequence[Sequence[int]]
) -> Tensor:
    """Count the rows where every pair is sent by itself, int64 (W, W), [from, to].

    Args: as `exchange.deliveries`. Rule: a row for each pair and each other rank that owns its expert or a
    shard of it. The sum is the most that a dispatch should move.

    Degenerate: a rank's rows for itself are not sent, the diagonal is 0.

    Decides: COST-03. Source: arithmetic.

    >>> ids = [torch.tensor([[1, 2], [0, 2]]), torch.tensor([[1, 0]])]
    >>> pair_rows(ids, [[0, 1]], [[0], [1, 2]]).tolist()
    [[0, 3], [1, 0]]
    """
    pairs = deliveries(ids_by_rank, exchange_groups, local_experts)
    return _counted(((pair.source, pair.destination) for pair in pairs), len(ids_by_rank))


def least_rows(
    ids_by_rank: Sequence[Tensor], exchange_groups: Sequence[Sequence[int]], local_experts: Sequence[Sequence[int]]
) -> Tensor:
    """Count the rows where a token is sent once to each rank that needs it, int64 (W, W), [from, to].

    Args: as `exchange.deliveries`. Rule: a row for each token and each other rank that owns one or more of its
    experts, or shards of them. No dispatch in one step can do with fewer.

    Degenerate: K = 1 is `pair_rows`. Tokens that stay at home and empty slots cost nothing.

    Decides: COST-03, COST-04. Source: arithmetic, a rank that needs a token must get it once.

    >>> ids = [torch.tensor([[1, 2], [0, 2]]), torch.tensor([[1, 0]])]
    >>> least_rows(ids, [[0, 1]], [[0], [1, 2]]).tolist()
    [[0, 2], [1, 0]]
    """
    tokens = needed(ids_by_rank, exchange_groups, local_experts)
    return _counted(((source, rank) for source, _, rank in tokens), len(ids_by_rank))


def all_gather_rows(tokens_by_rank: Sequence[int], exchange_groups: Sequence[Sequence[int]]) -> Tensor:
    """Count the rows where every rank of a group gets every token, int64 (W, W), [from, to].

    Decides: COST-03, COST-04. Source: semantics of all-gather.

    >>> all_gather_rows([5, 7, 3], [[0, 2], [1]]).tolist()
    [[0, 0, 5], [0, 0, 0], [3, 0, 0]]
    """
    rows_WW = no_rows(len(tokens_by_rank))  # (W, W)
    for group in exchange_groups:
        for source in group:
            for rank in group:
                rows_WW[source, rank] = tokens_by_rank[source] if source != rank else 0
    return rows_WW


def place_rows(
    places_by_rank: Sequence[int], exchange_groups: Sequence[Sequence[int]], held_by_rank: Sequence[int]
) -> Tensor:
    """Count the rows where every rank sends a fixed number to each expert of its group, int64 (W, W), [from, to].

    Args: the places C that a rank sends to one expert, the groups, and the number of experts N of each rank.

    Rule: C N to every other rank. Degenerate: C = 0 sends nothing; filled or not, a place is a row.

    Decides: COST-03, COST-04. Source: GShard, section 2.2 (dispatch of (E, C, D) by an all-to-all).

    >>> place_rows([2, 2, 5], [[0, 1], [2]], [3, 3, 6]).tolist()
    [[0, 6, 0], [6, 0, 0], [0, 0, 0]]
    """
    rows_WW = no_rows(len(places_by_rank))  # (W, W)
    for group in exchange_groups:
        for source in group:
            for rank in group:
                rows_WW[source, rank] = places_by_rank[source] * held_by_rank[rank] if source != rank else 0
    return rows_WW


def ratio(moved: int, smallest: int) -> float:
    """Divide the rows that were moved by the smallest number, the sum of `least_rows`.

    Degenerate: where nothing had to move the ratio is 1, and `moved` should be 0.

    Raises:
        ValueError: fewer moved than necessary, negative numbers.

    Source: arithmetic.

    >>> ratio(6, 4), ratio(5, 0)
    (1.5, 1.0)
    """
    if not 0 <= smallest <= moved:
        raise ValueError(f"{moved} rows moved of at least {smallest}: fewer than necessary cannot be right")
    return moved / smallest if smallest else 1.0


def needed(
    ids_by_rank: Sequence[Tensor], exchange_groups: Sequence[Sequence[int]], local_experts: Sequence[Sequence[int]]
) -> set[tuple[int, int, int]]:
    """Collect the (source, token, rank) where the rank owns an expert of the token, or a shard of it."""
    pairs = deliveries(ids_by_rank, exchange_groups, local_experts)
    return {(pair.source, pair.token, pair.destination) for pair in pairs}


def _counted(sent: Iterable[tuple[int, int]], W: int) -> Tensor:
    """Count rows by (from, to), int64 (W, W); those of a rank for itself are not sent."""
    rows_WW = no_rows(W)  # (W, W)
    for (source, rank), rows in Counter(sent).items():  # one access to the tensor for all rows of two ranks
        rows_WW[source, rank] = rows if source != rank else 0
    return rows_WW


def no_rows(W: int) -> Tensor:
    """Make a table of zeros, int64 (W, W)."""
    return torch.zeros(W, W, dtype=torch.int64)  # (W, W)
