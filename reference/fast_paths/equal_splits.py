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
        splits_WW: int64 (W, W) rows from [source] to [destination], `exchange.splits`.

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


def uneven_exchange(rows_by_rank: Sequence[Tensor], splits_WW: Tensor) -> tuple[Tensor, ...]:
    """Exchange pieces as they are: of every rank what it receives, float64 (R', D), by source (FAST-05).

    Args:
        rows_by_rank: of every rank, (R, D): its pieces for rank 0, 1, ..., one behind the other.
        splits_WW: int64 (W, W) rows from [source] to [destination].

    Degenerate: a rank that sends or receives nothing has (0, D).

    >>> rows = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0]])]
    >>> [received.flatten().tolist() for received in uneven_exchange(rows, torch.tensor([[1, 2], [1, 0]]))]
    [[1.0, 4.0], [2.0, 3.0]]
    """
    smallest_split(splits_WW)  # raises where these are no splits
    if len(rows_by_rank) != len(splits_WW) or len({rows_RD.shape[1:] for rows_RD in rows_by_rank}) != 1:
        raise ValueError(f"rows {[tuple(r.shape) for r in rows_by_rank]}: one (R, D) of {len(splits_WW)} ranks, one D")
    if [len(rows_RD) for rows_RD in rows_by_rank] != splits_WW.sum(dim=1).tolist():
        raise ValueError(f"rows {[len(r) for r in rows_by_rank]} are not the sums of the rows of {splits_WW.tolist()}")
    sent = [rows.double().split(n_W) for rows, n_W in zip(rows_by_rank, splits_WW.tolist(), strict=True)]
    return tuple(torch.cat(pieces) for pieces in zip(*sent, strict=True))


def equal_exchange(rows_by_rank: Sequence[Tensor], splits_WW: Tensor, split: int) -> tuple[Tensor, ...]:
    """Exchange padded pieces of `split` rows each, and compact: `uneven_exchange` by the detour (FAST-05).

    Rule: padded by what the rank sends, compacted by what it receives; every split of the exchange is s. On
    the way back the roles change: the same with splits_WW transposed (FAST-02).

    >>> rows, splits = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0]])], torch.tensor([[1, 2], [1, 0]])
    >>> [received.flatten().tolist() for received in equal_exchange(rows, splits, 5)]
    [[1.0, 4.0], [2.0, 3.0]]
    >>> back = equal_exchange(equal_exchange(rows, splits, 5), splits.T, 5)
    >>> [received.flatten().tolist() for received in back]
    [[1.0, 2.0, 3.0], [4.0]]
    """
    if split < smallest_split(splits_WW):
        raise ValueError(f"split {split} is smaller than the largest piece, {smallest_split(splits_WW)}")
    W = len(splits_WW)
    padded = [pad(rows, n_W, split) for rows, n_W in zip(rows_by_rank, splits_WW.tolist(), strict=True)]
    received = uneven_exchange(padded, torch.full((W, W), split))
    return tuple(compact(rows, n_W, split) for rows, n_W in zip(received, splits_WW.T.tolist(), strict=True))


def _check(pieces: Sequence[int], split: int) -> None:
    """Raise where a piece does not fit into a split."""
    if split < 0 or any(not 0 <= n <= split for n in pieces):
        raise ValueError(f"pieces {list(pieces)} must have 0..{split} rows, the size of a split")
