"""Padding and packing by hand: who pads how much, which rows are real, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Groups = Sequence[Sequence[int]]


def next_multiple(count: int, unit: int) -> int:
    """Units until the count is reached: none for a count of 0."""
    if count < 0 or unit < 1:
        raise ValueError(f"no multiple of {unit} holds {count}")
    reached = 0
    while reached < count:
        reached += unit
    return reached


def one_group_each(world: int, groups: Groups) -> None:
    """Refuse groups unless they name each rank of the world once and no other."""
    named = sorted(rank for group in groups for rank in group)
    if named != list(range(world)):
        raise ValueError(f"groups {groups} do not name each of {world} ranks once")


# ---- a common token count (PACK-01, -02, -11, -12, -14) ----------------------------------------------------


def common_counts(tokens: Sequence[int], groups: Groups, unit: int, *, at_least_one: bool = False) -> list[int]:
    """Padded token count of every rank: the smallest multiple of the unit that all of its group fit into."""
    one_group_each(len(tokens), groups)
    counts = [0] * len(tokens)
    for group in groups:
        for rank in group:
            for other in group:
                needed = next_multiple(tokens[other], unit)
                if at_least_one and needed == 0:
                    needed = unit
                counts[rank] = max(counts[rank], needed)
    return counts


def refusals_are_legal(
    refused: Sequence[bool], tokens: Sequence[int], groups: Groups, bound: int, unit: int
) -> list[bool]:
    """Per group: did the right ranks refuse a bound?

    Some count over the aligned bound: every rank must. No count over the bound itself: none may. In between the
    backend is free, but the ranks of a group refuse together or not at all.
    """
    one_group_each(len(tokens), groups)
    if len(refused) != len(tokens):
        raise ValueError(f"{len(refused)} answers of {len(tokens)} ranks")
    for count in tokens:
        next_multiple(count, unit)
    aligned = next_multiple(bound, unit)
    verdicts = []
    for group in groups:
        must = any(tokens[rank] > aligned for rank in group)
        may = any(tokens[rank] > bound for rank in group)
        outcomes = [everybody for everybody in (True, False) if (may if everybody else not must)]
        verdicts.append(any(all(refused[rank] == outcome for rank in group) for outcome in outcomes))
    return verdicts


# ---- sequences one after the other (PACK-07, -10) ----------------------------------------------------------


def divider(tp: int, cp: int, *, sequence_parallel: bool) -> int:
    """What a padded length must be a multiple of: two chunks per cp rank, a share per tp rank."""
    if tp < 1 or cp < 1:
        raise ValueError(f"tp {tp}, cp {cp}")
    chunks = cp + cp if cp > 1 else 1
    return chunks * tp if sequence_parallel else chunks


def running_sums(lengths: Sequence[int]) -> list[int]:
    """0, L_0, L_0 + L_1, ...: one more entry than sequences."""
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths {lengths}")
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def judged_lengths(
    lengths: Sequence[int], real: Sequence[int], padded: Sequence[int], unit: int
) -> Literal["smallest", "larger", "wrong"]:
    """Are these the cumulative lengths and padded lengths of those sequences?"""
    least = [next_multiple(length, unit) for length in lengths]
    if list(real) != running_sums(lengths):
        return "wrong"
    if len(padded) != len(lengths) + 1 or padded[0] != 0:
        return "wrong"
    spare = 0
    for i in range(len(lengths)):
        more = (padded[i + 1] - padded[i]) - least[i]
        if more < 0 or more % unit != 0:
            return "wrong"
        spare += more
    return "larger" if spare else "smallest"


# ---- which rows of a pack are real (PACK-08, -09) ----------------------------------------------------------


def sequence_of_row(row: int, real: Sequence[int], padded: Sequence[int]) -> tuple[int, int] | None:
    """Which token of which sequence stands in this row of a pack; none in a gap."""
    for i in range(len(padded) - 1):
        place = row - padded[i]
        if 0 <= place < real[i + 1] - real[i]:
            return i, place
    return None


def checked(real: Sequence[int], padded: Sequence[int]) -> None:
    """Refuse lists that describe no pack."""
    if not padded or len(real) != len(padded) or real[0] != 0 or padded[0] != 0:
        raise ValueError(f"{real} and {padded} are no two cumulative lists")
    for i in range(len(padded) - 1):
        if not 0 <= real[i + 1] - real[i] <= padded[i + 1] - padded[i]:
            raise ValueError(f"sequence {i} of {real} does not fit {padded}")


def real_rows(real: Sequence[int], padded: Sequence[int], rows: int | None = None) -> list[bool]:
    """For every row of a pack, whether a token stands there."""
    checked(real, padded)
    R = padded[-1] if rows is None else rows
    if R < padded[-1]:
        raise ValueError(f"{R} rows do not hold {padded}")
    return [sequence_of_row(row, real, padded) is not None for row in range(R)]


class Sequences(NamedTuple):
    """Sequences of rows one after the other, each from its own start, and the rows that belong to none."""

    rows: list[list[int]]
    gaps: list[int]


def laid_out(lengths: Sequence[int], lengths_padded: Sequence[int]) -> Sequences:
    """Row of every token of every sequence, written by walking along the pack."""
    if len(lengths) != len(lengths_padded) or any(p < n for n, p in zip(lengths, lengths_padded, strict=True)):
        raise ValueError(f"{lengths} do not fit {lengths_padded}")
    rows: list[list[int]] = []
    gaps: list[int] = []
    row = 0
    for length, room in zip(lengths, lengths_padded, strict=True):
        rows.append([])
        for place in range(room):
            (rows[-1] if place < length else gaps).append(row)
            row += 1
    return Sequences(rows, gaps)


# ---- context parallelism (PACK-15) -------------------------------------------------------------------------


def cp_rank_of(place: int, length: int, cp: int) -> int:
    """Which cp rank holds a place: count chunks from the nearer end of the sequence."""
    if cp == 1:
        return 0
    chunk = place * 2 * cp // length
    return min(chunk, 2 * cp - 1 - chunk)


def places_by_cp_rank(length: int, cp: int) -> list[list[int]]:
    """Places of one padded sequence on every cp rank; a front chunk stands before its mirror image."""
    if cp < 1 or length < 0 or (cp > 1 and length % (2 * cp) != 0):
        raise ValueError(f"{length} rows for cp {cp}")
    shares: list[list[int]] = [[] for _ in range(cp)]
    for place in range(length):
        shares[cp_rank_of(place, length, cp)].append(place)
    return shares


def rows_by_cp_rank(padded: Sequence[int], cp: int) -> list[list[int]]:
    """Rows of a whole pack on every cp rank, sequence after sequence."""
    checked([0] * len(padded), padded)
    places_by_cp_rank(0, cp)
    shares: list[list[int]] = [[] for _ in range(cp)]
    for i in range(len(padded) - 1):
        for share, places in zip(shares, places_by_cp_rank(padded[i + 1] - padded[i], cp), strict=True):
            share += [padded[i] + place for place in places]
    return shares


def each_row_once(shares: Sequence[Sequence[int]], rows: int) -> bool:
    """Do the shares name each row 0 .. rows - 1 once and nothing else?"""
    return sorted(row for share in shares for row in share) == list(range(rows))
