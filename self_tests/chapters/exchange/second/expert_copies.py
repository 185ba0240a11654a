"""Redundant copies of experts, by hand: look at every slot and ask where its row went.

Rank numbers and places are those of one exchange group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Handed(NamedTuple):
    """One delivery: of which slot, for which place, at which rank."""

    source: int
    token: int
    slot: int
    place: int
    rank: int


def check_copies(copies: Sequence[Sequence[int]]) -> None:
    """Every expert has a place, and every place one expert."""
    taken: set[int] = set()
    for e, places in enumerate(copies):
        if not places:
            raise ValueError(f"expert {e} has no place")
        for place in places:
            if place in taken:
                raise ValueError(f"place {place} is given twice: {copies}")
            taken.add(place)


def wrongly_handed(
    ids_by_source: Sequence[Ints],
    handed: Sequence[Handed],
    copies: Sequence[Sequence[int]],
    ranks_of_place: Sequence[Sequence[int]],
) -> list[tuple[int, int, int]]:
    """Slots whose rows did not go to one copy of their expert, whole, and nowhere else; ascending."""
    check_copies(copies)
    for places in copies:
        if any(not 0 <= place < len(ranks_of_place) or not ranks_of_place[place] for place in places):
            raise ValueError(f"places {places} are on {ranks_of_place}")
    slots: dict[tuple[int, int, int], int] = {}
    for source, ids_TK in enumerate(ids_by_source):
        for token, slot in np.ndindex(*ids_TK.shape):
            expert = int(ids_TK[token, slot])
            if not -1 <= expert < len(copies):
                raise ValueError(f"expert {expert} of {len(copies)}")
            slots[source, token, slot] = expert
    wrong = {row[:3] for row in handed if row[:3] not in slots}
    for at, expert in slots.items():
        went = sorted((row.place, row.rank) for row in handed if row[:3] == at)
        legal = [sorted((place, rank) for rank in ranks_of_place[place]) for place in copies[expert]]
        if went not in (legal if expert >= 0 else [[]]):
            wrong.add(at)
    return sorted(wrong)


def copy_gradients(own: Mapping[int, Floats], copies: Sequence[Sequence[int]]) -> dict[int, Floats]:
    """To every copy of an expert the sum of what its copies have."""
    check_copies(copies)
    finished: dict[int, Floats] = {}
    for places in copies:
        for place in places:
            if place not in own:
                raise ValueError(f"place {place} has no gradient")
            total = np.zeros(own[place].shape, dtype=np.float64)
            for at in np.ndindex(*total.shape):
                for other in places:
                    if other not in own:
                        raise ValueError(f"place {other} has no gradient")
                    total[at] += own[other][at]
            finished[place] = total
    return finished
