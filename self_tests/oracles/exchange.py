"""The exchange by hand: who is handed which row of whom.

A routed pair (token t, slot k) on source rank s with id e >= 0 goes, once, to each rank of s's exchange group (its
ep x etp group) that holds e or a shard of it. An id of -1 is an empty slot and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Pair(NamedTuple):
    """One row that must arrive: whose token, for which slot, where, and for which expert (global id)."""

    source: int
    token: int
    slot: int
    destination: int
    expert: int


def held_experts(rank: int, experts: int, ep: int, etp: int) -> list[int]:
    """Global ids held by `rank`: experts are dealt out in equal contiguous runs along ep; etp shards hold alike.

    The rank's place along ep is (rank // etp) % ep, because etp varies fastest in the expert rank and ep next.
    """
    place = (rank // etp) % ep
    return [expert for expert in range(experts) if expert * ep // experts == place]


def exchange_group(rank: int, ep: int, etp: int) -> list[int]:
    """The ranks of `rank`'s ep x etp group: a run of ep * etp neighbours."""
    first = rank - rank % (ep * etp)
    return list(range(first, first + ep * etp))


def deliveries(ids_by_rank: Sequence[Ints], experts: int, ep: int, etp: int) -> list[Pair]:
    """Every pair that must arrive, in order of (source, token, slot, destination); ids are (T, K), T may differ."""
    pairs: list[Pair] = []
    for source, ids_TK in enumerate(ids_by_rank):
        for token in range(ids_TK.shape[0]):
            for slot in range(ids_TK.shape[1]):
                expert = int(ids_TK[token, slot])
                if expert < 0:
                    continue
                for destination in exchange_group(source, ep, etp):
                    if expert in held_experts(destination, experts, ep, etp):
                        pairs.append(Pair(source, token, slot, destination, expert))
    return pairs


def counts(ids_by_rank: Sequence[Ints], experts: int, ep: int, etp: int) -> list[list[int]]:
    """Rows that each rank is handed for each of its local experts, in order of their global ids."""
    counted = []
    pairs = deliveries(ids_by_rank, experts, ep, etp)
    for rank in range(len(ids_by_rank)):
        row = []
        for expert in held_experts(rank, experts, ep, etp):
            row.append(sum(1 for pair in pairs if pair.destination == rank and pair.expert == expert))
        counted.append(row)
    return counted


def splits(ids_by_rank: Sequence[Ints], experts: int, ep: int, etp: int) -> list[list[int]]:
    """Rows from each source rank to each destination rank, (W, W), zero between different exchange groups."""
    world = len(ids_by_rank)
    sent = [[0] * world for _ in range(world)]
    for pair in deliveries(ids_by_rank, experts, ep, etp):
        sent[pair.source][pair.destination] += 1
    return sent
