"""The exchange by hand: who is handed which row of whom.

A routed pair (token t, slot k) on source rank s with id e >= 0 goes, once, to each rank of s's exchange group
(its ep x etp group) that holds e or a shard of it. An id of -1 is an empty slot and goes nowhere.

Told from the receiving end: every rank walks through its experts and asks its group's sources for their rows.
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


class Placement(NamedTuple):
    """The ranks of every exchange group, and for every rank the global ids of the experts it holds."""

    exchange_groups: Sequence[Sequence[int]]
    held: Sequence[Sequence[int]]


def contiguous(world: int, experts: int, ep: int, etp: int) -> Placement:
    """Deal experts out along ep in equal runs, all etp shards alike; a group is a run of ep * etp neighbours.

    A rank's place along ep is (rank // etp) % ep: etp varies fastest in the expert rank, and ep next.
    """
    groups = [list(range(first, first + ep * etp)) for first in range(0, world, ep * etp)]
    share = experts // ep
    held = []
    for rank in range(world):
        place = (rank // etp) % ep
        held.append(list(range(place * share, (place + 1) * share)))
    return Placement(groups, held)


def rows_for(destination: int, expert: int, ids_by_rank: Sequence[Ints], placement: Placement) -> list[Pair]:
    """What one rank is handed for one of its experts, by rising source, token and slot."""
    rows = []
    for group in placement.exchange_groups:
        if destination not in group:
            continue
        for source in sorted(group):
            ids_TK = ids_by_rank[source]
            for token in range(ids_TK.shape[0]):
                for slot in range(ids_TK.shape[1]):
                    if int(ids_TK[token, slot]) == expert:
                        rows.append(Pair(source, token, slot, destination, expert))
    return rows


def deliveries(ids_by_rank: Sequence[Ints], placement: Placement) -> list[Pair]:
    """Every pair that must arrive, by (source, token, slot, destination); ids are (T, K), T may differ."""
    pairs: list[Pair] = []
    for destination, held in enumerate(placement.held):
        for expert in held:
            pairs += rows_for(destination, expert, ids_by_rank, placement)
    return sorted(pairs)
