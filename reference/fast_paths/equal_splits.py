"""Equal splits: pieces padded to one size before an exchange, and compacted after it.

Padding is a detour: pad, exchange, compact gives what the exchange of the uneven pieces gives, forward and
backward.

Sources: arithmetic: padding at the end and its inverse are selections of rows; semantics of all-to-all (what
one sends is what the other expects).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad(rows_RD: Tensor, pieces: Sequence[int], split: int) -> Tensor:
    """Pad every piece with zeros to `split` rows, (R, D) -> float64 (len(pieces) * split, D), differentiable.

    Args:
        rows_RD: the pieces, one behind the other.
        pieces: rows of each, n_i; they sum to R.
        split: s, at least the largest.

    Rule: out[i s + j] = x_i[j] for j < n_i, 0 from there on (FAST-01). So the gradient of a row is the
    upstream gradient where it went, and nothing at padding rows counts (FAST-03).

    Degenerate: n_i = 0 is s rows of zeros, n_i = s is left as it is, s = 0 or no piece is empty.

    Decides: FAST-01, FAST-03. Source: arithmetic (padding at the end is a selection of rows).

    >>> pad(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [1, 0, 2], 2).tolist()
    [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [5.0, 6.0]]
    """
    _check(pieces, split)
    if rows_RD.dim() != 2 or len(rows_RD) != sum(pieces):
        raise ValueError(
            f"rows {tuple(rows_RD.shape)} are not (R, D) with R = {sum(pieces)}, the sum of {list(pieces)}"
        )
    parts = [rows_RD.double()[:0]]  # so that no piece at all has a width and a gradient too
    for x_nD in rows_RD.double().split(list(pieces)):
        parts += [x_nD, x_nD.new_zeros(split - len(x_nD), rows_RD.shape[1])]
    return torch.cat(parts)  # (len(pieces) * s, D)


def compact(padded_PD: Tensor, pieces: Sequence[int], split: int) -> Tensor:
    """Undo `pad`, (len(pieces) * split, D) -> float64 (R, D), differentiable.

    Rule: the concatenation over i of in[i s : i s + n_i] (FAST-02). Padding rows are not looked at, whatever
    they hold, and have gradient 0 (FAST-03).

    Degenerate: all n_i = 0 gives (0, D).

    Decides: FAST-02, FAST-03. Source: arithmetic (inverse of padding at the end).

    >>> padded = torch.tensor([[1.0], [float("nan")], [7.0], [7.0], [3.0], [5.0]])
    >>> compact(padded, [1, 0, 2], 2).tolist()
    [[1.0], [3.0], [5.0]]
    """
    _check(pieces, split)
    if padded_PD.dim() != 2 or len(padded_PD) != len(pieces) * split:
        raise ValueError(f"padded rows {tuple(padded_PD.shape)} are not {len(pieces)} pieces of {split} rows")
    parts = [padded_PD.double()[i * split : i * split + n] for i, n in enumerate(pieces)]
    return torch.cat([padded_PD.double()[:0], *parts])  # (R, D)


def smallest_split(splits_WW: Tensor) -> int:
    """Give the smallest allowed size of equal splits, the largest piece between any two ranks (FAST-04).

    Args:
        splits_WW: int64 (W, W) rows from [source] to [destination].

    Degenerate: nothing to send gives 0.

    >>> smallest_split(torch.tensor([[1, 0], [5, 2]]))
    5
    """
    shape = tuple(splits_WW.shape)
    if splits_WW.dtype != torch.int64 or len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"splits are {splits_WW.dtype} of shape {shape}, not int64 (W, W) with W >= 1")
    if int(splits_WW.min()) < 0:
        raise ValueError(f"splits {splits_WW.tolist()} hold a negative number of rows")
    return int(splits_WW.max())


def lawful_splits(split_by_rank: Sequence[int], splits_WW: Tensor) -> bool:
    """Return whether the size that each rank pads to is allowed: one for all, and large enough.

    Decides: FAST-04. Source: semantics of all-to-all (what one sends is what the other expects).

    >>> splits = torch.tensor([[1, 0], [5, 2]])
    >>> lawful_splits([5, 5], splits), lawful_splits([8, 8], splits), lawful_splits([1, 5], splits)
    (True, True, False)
    """
    smallest = smallest_split(splits_WW)
    if len(split_by_rank) != len(splits_WW):
        raise ValueError(f"{len(split_by_rank)} sizes of splits for {len(splits_WW)} ranks")
    return len(set(split_by_rank)) == 1 and split_by_rank[0] >= smallest


def _check(pieces: Sequence[int], split: int) -> None:
    """Raise where a piece does not fit into a split."""
    if split < 0 or any(not 0 <= n <= split for n in pieces):
        raise ValueError(f"pieces {list(pieces)} must have 0..{split} rows, the size of a split")
