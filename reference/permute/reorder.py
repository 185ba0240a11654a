"""Reorder: received rows from source-major to expert-major order, and back.

After an all-to-all the rows lie source by source, in each source expert by expert. Experts want them expert
by expert, in each expert source by source. Both are orders of the same W * N segments.

Source: arithmetic: two orders of the same segments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_expert_major(rows_R: Tensor, counts_WN: Tensor) -> Tensor:
    """Put rows from source-major into expert-major order, (R, ...) -> (R, ...); moved, never cast.

    Args:
        rows_R: (R, ...), the rows of source 0 for expert 0, for expert 1, ..., of source 1 for expert 0, ...
        counts_WN: int64 (W, N), the rows from each source for each local expert; R is their sum.

    Rule: the segments (s, n) are put one after the other by n, then s; the rows in a segment keep their order.

    Degenerate: N = 1 or W = 1 change nothing. Equal counts m: the transposition (W, N, m) -> (N, W, m).
    Segments without a row, and no rows at all, are fine.

    Raises:
        ValueError: counts that are negative, not int64 or not (W, N), or whose sum is not R.

    Decides: EXCH-20. Source: arithmetic.

    >>> counts = torch.tensor([[1, 2], [2, 0], [1, 1]])
    >>> to_expert_major(torch.tensor([10, 11, 11, 20, 20, 30, 31]), counts).tolist()
    [10, 20, 20, 30, 11, 11, 31]
    """
    _check(counts_WN, rows_R.shape[0])
    W, N = counts_WN.shape
    segments = rows_R.split(counts_WN.flatten().tolist())  # segment (s, n) is number s * N + n
    ordered = [segments[s * N + n] for n in range(N) for s in range(W)]
    return torch.cat([rows_R[:0], *ordered])  # (R, ...)


def to_source_major(rows_R: Tensor, counts_WN: Tensor) -> Tensor:
    """Put rows from expert-major back into source-major order; undoes `to_expert_major` with the same counts.

    Rule: the row at p comes from position q(p), where the way there had brought it.

    Raises:
        ValueError: as `to_expert_major`.

    Decides: EXCH-20. Source: arithmetic.

    >>> counts = torch.tensor([[1, 2], [2, 0], [1, 1]])
    >>> to_source_major(torch.tensor([10, 20, 20, 30, 11, 11, 31]), counts).tolist()
    [10, 11, 11, 20, 20, 30, 31]
    """
    _check(counts_WN, rows_R.shape[0])
    return rows_R[reorder_positions(counts_WN)]  # (R, ...)


def reorder_positions(counts_WN: Tensor) -> Tensor:
    """Find the position q in expert-major order of every row p in source-major order, int64 (R,).

    Raises:
        ValueError: counts that are negative, not int64 or not (W, N).

    Decides: EXCH-20. Source: arithmetic.

    >>> reorder_positions(torch.tensor([[1, 2], [2, 0], [1, 1]])).tolist()
    [0, 4, 5, 1, 2, 3, 6]
    """
    _check(counts_WN, int(counts_WN.sum()))
    from_q = to_expert_major(torch.arange(int(counts_WN.sum())), counts_WN)  # (R,); the p of every q
    q_of_p = torch.empty_like(from_q)  # (R,)
    q_of_p[from_q] = torch.arange(from_q.shape[0])
    return q_of_p


def _check(counts_WN: Tensor, rows: int) -> None:
    """Raise ValueError unless the counts are int64 (W, N), not negative, and add up to the rows."""
    if counts_WN.dim() != 2 or counts_WN.dtype != torch.int64 or bool((counts_WN < 0).any()):
        raise ValueError(f"counts are int64 (W, N) and not negative, not {counts_WN.tolist()}")
    if int(counts_WN.sum()) != rows:
        raise ValueError(f"there are {rows} rows, but the counts add up to {int(counts_WN.sum())}")
