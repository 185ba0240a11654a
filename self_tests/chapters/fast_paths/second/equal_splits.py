"""Equal splits by hand, one row at a time: D columns, W ranks, pieces of n_i rows, every one padded to s rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def demand(holds: bool, complaint: str) -> None:
    """Refuse what has no answer."""
    if not holds:
        raise ValueError(complaint)


def places(pieces: Sequence[int], split: int) -> list[int]:
    """For each of len(pieces) * split places the row that lies there, -1 for padding."""
    rows = []
    row = 0
    for piece in pieces:
        demand(0 <= piece <= split, f"a piece of {piece} rows in a split of {split}")
        for j in range(split):
            rows.append(row + j if j < piece else -1)
        row += piece
    return rows


def pad(rows_RD: Floats, pieces: Sequence[int], split: int) -> Floats:
    """Every place has its row, or zeros."""
    lying = places(pieces, split)
    demand(rows_RD.ndim == 2 and sum(pieces) == len(rows_RD), f"{rows_RD.shape} are no rows in pieces {pieces}")
    padded_PD = np.zeros((len(lying), rows_RD.shape[1]))
    for place, row in enumerate(lying):
        if row != -1:
            padded_PD[place] = rows_RD[row]
    return padded_PD


def compact(padded_PD: Floats, pieces: Sequence[int], split: int) -> Floats:
    """Every row is taken from its place."""
    lying = places(pieces, split)
    demand(padded_PD.ndim == 2 and len(lying) == len(padded_PD), f"{padded_PD.shape} is not {len(pieces)} x {split}")
    rows_RD = np.zeros((sum(pieces), padded_PD.shape[1]))
    for place, row in enumerate(lying):
        if row != -1:
            rows_RD[row] = padded_PD[place]
    return rows_RD


def pad_backward(g_PD: Floats, pieces: Sequence[int], split: int) -> Floats:
    """A row's gradient is that of its place; what a place of padding has goes nowhere."""
    return compact(g_PD, pieces, split)


def compact_backward(g_RD: Floats, pieces: Sequence[int], split: int) -> Floats:
    """A place's gradient is that of its row; a place of padding has 0."""
    return pad(g_RD, pieces, split)


def smallest_split(splits_WW: Ints) -> int:
    """The largest piece between any two ranks."""
    demand(splits_WW.dtype == np.int64 and splits_WW.ndim == 2, "splits are not int64 (W, W)")
    demand(0 < splits_WW.shape[0] == splits_WW.shape[1], f"splits {splits_WW.shape}")
    largest = 0
    for piece in splits_WW.reshape(-1).tolist():
        demand(piece >= 0, f"a piece of {piece} rows")
        largest = max(largest, piece)
    return largest


def lawful_splits(split_by_rank: Sequence[int], splits_WW: Ints) -> bool:
    """All ranks agree, and every piece fits."""
    needed = smallest_split(splits_WW)
    demand(len(split_by_rank) == len(splits_WW), f"{len(split_by_rank)} ranks, {len(splits_WW)} in the splits")
    return all(split == split_by_rank[0] and split >= needed for split in split_by_rank)
