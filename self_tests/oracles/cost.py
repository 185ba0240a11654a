"""How many rows an exchange moves between ranks, by hand: for every destination, walk through all tokens of others.

Results (W, W) count rows from rank to rank, those (W, nodes) from rank to node. A rank owns an expert if it is in the
source's exchange group and holds it, or a shard of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .exchange import Placement, deliveries

Ints = NDArray[np.int64]
Lists = Sequence[Sequence[int]]


def needs(ids_by_rank: Sequence[Ints], exchange_groups: Lists, local_experts: Lists) -> list[tuple[int, int, int]]:
    """Source, token and destination of every delivery that leaves its rank, as often as there are slots for it."""
    for rank, ids_TK in enumerate(ids_by_rank):
        mine = [group for group in exchange_groups if rank in group]
        held = {expert for group in mine for other in group for expert in local_experts[other]}
        if len(mine) != 1 or any(expert != -1 and expert not in held for expert in ids_TK.flatten().tolist()):
            raise ValueError(f"rank {rank} in groups {mine} asks for {ids_TK.tolist()} of {held}")
    pairs = deliveries(ids_by_rank, Placement(exchange_groups, local_experts))
    return [(pair.source, pair.token, pair.destination) for pair in pairs if pair.source != pair.destination]


def pair_rows(ids_by_rank: Sequence[Ints], exchange_groups: Lists, local_experts: Lists) -> Ints:
    """One row for every slot and owner."""
    rows_WW = np.zeros((len(ids_by_rank), len(ids_by_rank)), dtype=np.int64)
    for source, _, destination in needs(ids_by_rank, exchange_groups, local_experts):
        rows_WW[source, destination] += 1
    return rows_WW


def least_rows(ids_by_rank: Sequence[Ints], exchange_groups: Lists, local_experts: Lists) -> Ints:
    """One row for every token and rank that needs it."""
    rows_WW = np.zeros((len(ids_by_rank), len(ids_by_rank)), dtype=np.int64)
    for source, _, destination in set(needs(ids_by_rank, exchange_groups, local_experts)):
        rows_WW[source, destination] += 1
    return rows_WW


def check_nodes(node_of_W: Sequence[int], world: int) -> int:
    """How many nodes there are; they are numbered from 0 on."""
    if len(node_of_W) != world or set(node_of_W) != set(range(len(set(node_of_W)))):
        raise ValueError(f"nodes {node_of_W} of {world} ranks")
    return len(set(node_of_W))


def rows_between_nodes(
    ids_by_rank: Sequence[Ints], exchange_groups: Lists, local_experts: Lists, node_of_W: Sequence[int]
) -> Ints:
    """One row for every token and other node that needs it."""
    rows_WN = np.zeros((len(ids_by_rank), check_nodes(node_of_W, len(ids_by_rank))), dtype=np.int64)
    wanted = needs(ids_by_rank, exchange_groups, local_experts)
    for source, _, node in {(source, token, node_of_W[destination]) for source, token, destination in wanted}:
        if node != node_of_W[source]:
            rows_WN[source, node] += 1
    return rows_WN


def rows_by_node(
    ids_by_rank: Sequence[Ints],
    exchange_groups: Lists,
    local_experts: Lists,
    node_of_W: Sequence[int],
    relay_WN: Lists,
) -> Ints:
    """Rows where a token crosses to a node once, to the relay there, which hands it on to those that need it."""
    world = len(ids_by_rank)
    check_nodes(node_of_W, world)
    hops = set()
    for source, token, destination in needs(ids_by_rank, exchange_groups, local_experts):
        node = node_of_W[destination]
        if node == node_of_W[source]:
            hops.add((source, token, source, destination))
            continue
        relay = relay_WN[source][node]
        mine = next(group for group in exchange_groups if source in group)
        if relay not in mine or node_of_W[relay] != node:
            raise ValueError(f"relay {relay} of rank {source} is not on node {node}, or not of {mine}")
        hops.add((source, token, source, relay))
        hops.add((source, token, relay, destination))
    rows_WW = np.zeros((world, world), dtype=np.int64)
    for _, _, here, there in hops:
        if here != there:
            rows_WW[here, there] += 1
    return rows_WW


def all_gather_rows(tokens_by_rank: Sequence[int], exchange_groups: Lists) -> Ints:
    """Every token to every other rank of its group."""
    if any(tokens < 0 for tokens in tokens_by_rank):
        raise ValueError(f"tokens {tokens_by_rank}")
    world = len(tokens_by_rank)
    rows_WW = np.zeros((world, world), dtype=np.int64)
    for source in range(world):
        mine = [group for group in exchange_groups if source in group]
        if len(mine) != 1:
            raise ValueError(f"rank {source} is in groups {mine}")
        for destination in mine[0]:
            if destination != source:
                rows_WW[source, destination] = tokens_by_rank[source]
    return rows_WW


def ratio(moved: int, smallest: int) -> float:
    """How many times the smallest number of rows was moved; 1 where none had to be."""
    if not 0 <= smallest <= moved:
        raise ValueError(f"moved {moved} rows, where {smallest} had to be")
    return moved / smallest if smallest else 1.0
