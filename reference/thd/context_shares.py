"""Context shares: which rows of a packed tensor are on which cp rank.

Causal attention costs more at the end of a sequence than at its beginning. So a sequence is cut into 2 cp
chunks, and each rank gets one from the front and its mirror image from the back.

Source: behaviour of Megatron-Core and Transformer Engine (load-balanced context parallel order).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def context_share(length_padded: int, cp: int) -> tuple[tuple[int, ...], ...]:
    """List, for every cp rank, the places of one sequence that it holds, in its own order.

    Rule: chunks of P / (2 cp) places; rank c holds chunk c, then chunk 2 cp - 1 - c.

    Degenerate: cp = 1 holds the whole sequence, of any length; P = 0 leaves every rank empty.

    Raises:
        ValueError: cp < 1, P < 0, or P not a multiple of 2 cp where cp > 1.

    Decides: PACK-15. Source: behaviour of Megatron-Core (context parallel order).

    >>> context_share(12, 3)
    ((0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7))
    """
    if cp < 1 or length_padded < 0:
        raise ValueError(f"a sequence of {length_padded} rows cannot be shared by cp = {cp} ranks")
    if cp == 1:
        return (tuple(range(length_padded)),)
    if length_padded % (2 * cp):
        raise ValueError(
            f"{length_padded} rows cannot be cut into 2 cp = {2 * cp} equal chunks; pad the sequence first"
        )
    size = length_padded // (2 * cp)
    shares = []
    for c in range(cp):
        front, back = c * size, (2 * cp - 1 - c) * size
        shares.append((*range(front, front + size), *range(back, back + size)))
    return tuple(shares)


def context_rows(cu_seqlens_padded: Tensor, cp: int) -> tuple[Tensor, ...]:
    """List, for every cp rank, the rows of the whole pack that it holds, int64, in its own order.

    Rule: its share of sequence 0, then its share of sequence 1, and so on. Whether such a row is real is told
    by its place in the whole sequence: `real_rows(...)[rows]`. A short sequence may leave a rank gaps alone.

    Degenerate: no sequence, or only empty ones: no row on any rank.

    Raises:
        ValueError: as `context_share`; a list that is empty, not from 0, or descending.

    Decides: PACK-15. Source: behaviour of Transformer Engine (thd partition).

    >>> [rows.tolist() for rows in context_rows(torch.tensor([0, 4, 12]), 2)]
    [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    """
    sums = cu_seqlens_padded.tolist()
    if not sums or sums[0] != 0:
        raise ValueError(f"{sums} are no sums of padded lengths: they start at 0")
    if cp < 1:
        raise ValueError(f"cp = {cp} must be a positive size")
    rows_by_rank: list[list[int]] = [[] for _ in range(cp)]
    for first, end in pairwise(sums):
        for rows, share in zip(rows_by_rank, context_share(end - first, cp), strict=True):
            rows += [first + place for place in share]
    return tuple(torch.tensor(rows, dtype=torch.int64) for rows in rows_by_rank)


def is_partition(rows_by_rank: Sequence[Tensor], rows: int) -> bool:
    """Return whether the ranks of a cp group hold every row of the pack exactly once between them.

    What another order than `context_rows`, if an implementation states one, has to satisfy.

    Degenerate: no row at all is held by ranks that hold none.

    Decides: PACK-15. Source: definition of a partition.

    >>> is_partition([torch.tensor([2, 0]), torch.tensor([1])], 3), is_partition([torch.tensor([0, 0])], 1)
    (True, False)
    """
    held = [row for rows_R in rows_by_rank for row in rows_R.tolist()]
    return sorted(held) == list(range(rows))
