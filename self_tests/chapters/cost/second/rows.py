"""How many rows an exchange moves between ranks, by hand: for every destination, walk through all tokens of others.

Results (W, W) count rows from rank to rank. A rank owns an expert if it is in the
source's exchange group and holds it, or a shard of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.exchange.second.deliveries import Placement, deliveries

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


def place_rows(places_by_rank: Sequence[int], exchange_groups: Lists, held_by_rank: Sequence[int]) -> Ints:
    """For each expert of every other rank of a group, the places that the source has for it."""
    rows_WW = np.zeros((len(places_by_rank), len(places_by_rank)), dtype=np.int64)
    for source, places in enumerate(places_by_rank):
        others = {rank for group in exchange_groups if source in group for rank in group} - {source}
        for destination in others:
            rows_WW[source, destination] = sum(places for _ in range(held_by_rank[destination]))
    return rows_WW


def ratio(moved: int, smallest: int) -> float:
    """How many times the smallest number of rows was moved; 1 where none had to be."""
    if not 0 <= smallest <= moved:
        raise ValueError(f"moved {moved} rows, where {smallest} had to be")
    return moved / smallest if smallest else 1.0
