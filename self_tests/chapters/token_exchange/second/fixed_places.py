"""A fixed number of places per expert, by hand, and how large a static budget has to be.

    out_r = places_nc for the r-th filled place      dplaces_nc = g_r there, 0 at every other place

Rows are told apart by source and token alone: two slots of a token for one expert are two equal rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Places(NamedTuple):
    """Whose token stands where (-1: nobody's), how many per expert, and where each source's run begins."""

    source_NC: Ints
    token_NC: Ints
    counts_N: list[int]
    begin_NS: Ints
    run_NS: Ints


def wanted_rows(ids_by_source: Sequence[Ints], expert: int) -> list[tuple[int, int]]:
    """Source and token of every slot that chose the expert."""
    rows = []
    for source, ids_TK in enumerate(ids_by_source):
        for token, ids_K in enumerate(ids_TK.tolist()):
            if any(chosen < -1 for chosen in ids_K):
                raise ValueError(f"ids {ids_K} of token {token} on {source}")
            rows += [(source, token)] * ids_K.count(expert)
    return rows


def fixed_places(ids_by_source: Sequence[Ints], local_experts: Sequence[int], capacity: int) -> Places:
    """Rows of each expert in its first places, by source, token and slot."""
    N, S = len(local_experts), len(ids_by_source)
    if len(set(local_experts)) != N or any(expert < 0 for expert in local_experts):
        raise ValueError(f"experts {local_experts}")
    counts: list[int] = []
    source_NC = np.full((N, capacity), -1, dtype=np.int64)
    token_NC = np.full((N, capacity), -1, dtype=np.int64)
    begin_NS, run_NS = np.zeros((N, S), dtype=np.int64), np.zeros((N, S), dtype=np.int64)
    for n, expert in enumerate(local_experts):
        rows = wanted_rows(ids_by_source, expert)
        if len(rows) > capacity:
            raise ValueError(f"{len(rows)} rows for {capacity} places of expert {expert}")
        counts.append(len(rows))
        for place, (source, token) in enumerate(rows):
            source_NC[n, place], token_NC[n, place] = source, token
        for source in range(S):
            begin_NS[n, source] = sum(1 for other, _ in rows if other < source)
            run_NS[n, source] = sum(1 for other, _ in rows if other == source)
    return Places(source_NC, token_NC, counts, begin_NS, run_NS)


def legal_places(
    places: Places, ids_by_source: Sequence[Ints], local_experts: Sequence[int], *, runs: bool
) -> list[bool]:
    """Whether each expert's places hold its rows, and, with runs, each source's where it says."""
    return [
        holds(places, n, wanted_rows(ids_by_source, expert), len(ids_by_source), runs=runs)
        for n, expert in enumerate(local_experts)
    ]


def holds(places: Places, n: int, rows: list[tuple[int, int]], sources: int, *, runs: bool) -> bool:
    """Whether local expert n has these rows; every run is walked, and leaves no place out and visits none twice."""
    count, capacity = int(places.counts_N[n]), places.source_NC.shape[1]
    if count != len(rows) or count > capacity:
        return False
    stands = [(int(places.source_NC[n, c]), int(places.token_NC[n, c])) for c in range(count)]
    if sorted(stands) != sorted(rows):
        return False
    if not runs:
        return True
    visited = []
    for source in range(sources):
        begin, length = int(places.begin_NS[n, source]), int(places.run_NS[n, source])
        for place in range(begin, begin + length):
            if not 0 <= place < count or stands[place][0] != source:
                return False
            visited.append(place)
        if length < 0:
            return False
    return sorted(visited) == list(range(count))


def least_budget(
    tokens_by_rank: Sequence[int],
    top_k: int,
    *,
    factor: float,
    ep: int,
    etp: int = 1,
    held: int,
    multiple: int = 1,
) -> int:
    """Rows that a budget of this factor must have room for, with what filling up experts may take.

    Rows come whole: a part of one is none. A share that a float32 may have missed by rounding counts as the nearest
    whole number.
    """
    sizes = [ep, etp, top_k, multiple]
    if min(sizes) < 1 or len(tokens_by_rank) != ep * etp or min(tokens_by_rank) < 0 or held < 0:
        raise ValueError(f"tokens {tokens_by_rank}, ep, etp, top_k, multiple {sizes}, held {held}")
    if not 0.0 <= factor < float("inf"):
        raise ValueError(f"factor {factor}")
    if sum(tokens_by_rank) == 0:
        return 0
    share = Fraction(factor) * etp * sum(tokens_by_rank) * top_k / (ep * etp)
    rows, slack = share.numerator // share.denominator, Fraction(4, 2**24) * share
    missing = rows + 1 - share
    if missing <= slack and missing <= share - rows:
        rows += 1
    return rows + held * (multiple - 1)
