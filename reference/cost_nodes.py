"""Cost between nodes: the rows of width D where a token crosses to a node once, and goes on within it.

Source: DeepSeek-V3 section 3.2.2 (tokens cross nodes once per node).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.cost import needed, no_rows


def rows_between_nodes(
    ids_by_rank: Sequence[Tensor],
    exchange_groups: Sequence[Sequence[int]],
    local_experts: Sequence[Sequence[int]],
    node_of_W: Sequence[int],
) -> Tensor:
    """Count the rows where a token is sent once to each node that needs it, int64 (W, nodes), [from, to node].

    Args: as `exchange.deliveries`, and of every rank its node, 0, 1, ...

    Rule: a row for each token and each node other than its own that has an owner of one of its experts.

    Raises:
        ValueError: another number of ranks, node numbers with a gap.

    Decides: COST-04. Source: DeepSeek-V3 section 3.2.2.

    >>> ids, none = torch.tensor([[1, 2], [0, 1]]), torch.zeros(0, 2, dtype=torch.int64)
    >>> rows_between_nodes([ids, none, none], [[0, 1, 2]], [[0], [1], [2]], [0, 1, 1]).tolist()
    [[0, 2], [0, 0], [0, 0]]
    """
    _check_nodes(node_of_W, len(ids_by_rank))
    pairs = needed(ids_by_rank, exchange_groups, local_experts)
    rows_WD = torch.zeros(len(node_of_W), len(set(node_of_W)), dtype=torch.int64)  # (W, nodes)
    for source, _, node in {(source, token, node_of_W[rank]) for source, token, rank in pairs}:
        rows_WD[source, node] += node != node_of_W[source]
    return rows_WD


def rows_by_node(
    ids_by_rank: Sequence[Tensor],
    exchange_groups: Sequence[Sequence[int]],
    local_experts: Sequence[Sequence[int]],
    node_of_W: Sequence[int],
    relay_WN: Sequence[Sequence[int]],
) -> Tensor:
    """Count the rows where tokens cross between nodes once, and then go on within the node, int64 (W, W), [from, to].

    Args: as `rows_between_nodes`, and of every source and node the rank there that its tokens come to first.

    Rule: one row from s to its relay on each other node that needs the token; then one from the relay to each other
    owner on that node. On the node of s, one from s to each other owner.

    Degenerate: one node, or nodes of one rank: `least_rows`. A relay that needs the token has it already.

    Raises:
        ValueError: a relay that is needed and on another node or in another exchange group; nodes as above.

    Decides: COST-04. Source: DeepSeek-V3 section 3.2.2.

    >>> ids, none = torch.tensor([[1, 2], [0, 2]]), torch.zeros(0, 2, dtype=torch.int64)
    >>> rows_by_node([ids, none, none], [[0, 1, 2]], [[0], [1], [2]], [0, 1, 1], [[0, 1]] * 3).tolist()
    [[0, 2, 0], [0, 0, 2], [0, 0, 0]]
    """
    _check_nodes(node_of_W, len(ids_by_rank))
    rows_WW = no_rows(len(ids_by_rank))  # (W, W)
    sent = set()  # (source, token, from, to); a row that two owners need is one
    for source, token, rank in needed(ids_by_rank, exchange_groups, local_experts):
        node, at = node_of_W[rank], source  # at: where the token is before it goes to the rank
        if node != node_of_W[source]:
            at = relay_WN[source][node]
            group = next(group for group in exchange_groups if source in group)
            if at not in group or node_of_W[at] != node:
                raise ValueError(f"rank {source} reaches node {node} by rank {at}, not of that node and its own group")
            sent.add((source, token, source, at))
        sent.add((source, token, at, rank))
    for _, _, start, end in sent:
        rows_WW[start, end] += start != end
    return rows_WW


def _check_nodes(node_of_W: Sequence[int], W: int) -> None:
    """Raise unless every rank has a node, numbered without a gap."""
    if len(node_of_W) != W or set(node_of_W) != set(range(len(set(node_of_W)))):
        raise ValueError(f"nodes {list(node_of_W)} of {W} ranks: give one to each, numbered 0, 1, ... without a gap")
