"""Padded segments: the rows of each expert, padded to a multiple.

Matrix kernels with alignment take each expert's rows in a segment whose length is a multiple M. The rows come
first, then the padding.

Sources: behaviour of Transformer Engine (fp8 padding) and of torchtitan (generate_permute_indices).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.reference.token_padding.padding import aligned


def legal_counts(claimed_N: Sequence[int], rows_N: Sequence[int], multiple: int) -> tuple[bool, ...]:
    """Say of every expert whether a count is the smallest multiple that holds its rows.

    Args:
        claimed_N: for every local expert, the count that an implementation delivers, padding included.
        rows_N: for every local expert, n, the pairs delivered to it.
        multiple: M.

    Degenerate: n = 0 may have M rows of padding, or none, for M > 1. M = 1 pads nothing.

    Raises:
        ValueError: lists of different lengths, a negative number of pairs, a multiple below 1.

    Decides: EXCH-18. Source: arithmetic.

    >>> legal_counts([8, 12, 0, 4, 8], [5, 4, 0, 0, 0], 4)
    (True, False, True, True, False)
    """
    if multiple < 1:
        raise ValueError(f"rows cannot be padded to a multiple of {multiple}; need 1 or more")
    legal = []
    for claimed, rows in zip(claimed_N, rows_N, strict=True):
        allowed = {aligned(rows, alignment=multiple)}
        if rows == 0 and multiple > 1:
            allowed.add(multiple)
        legal.append(claimed in allowed)
    return tuple(legal)


def segment_starts(counts_N: Sequence[int]) -> tuple[int, ...]:
    """Find the first row of each expert's segment: the sum of the counts before it, padding included.

    Degenerate: an expert with count 0 starts where the next one does.

    Raises:
        ValueError: a negative count.

    Decides: EXCH-18. Source: arithmetic.

    >>> segment_starts([8, 0, 4, 4])
    (0, 8, 8, 12)
    """
    if min(counts_N, default=0) < 0:
        raise ValueError(f"a segment cannot have {min(counts_N)} rows: {list(counts_N)}")
    return tuple(sum(counts_N[:n]) for n in range(len(counts_N)))


def padding_rows(counts_N: Sequence[int], rows_N: Sequence[int]) -> Tensor:
    """Tell padding from rows, bool (sum of counts,): the last counts - n rows of each segment are padding.

    Degenerate: n = 0 is padding alone; n = count has none.

    Raises:
        ValueError: lists of different lengths, n > count, a negative number.

    Decides: EXCH-02, EXCH-18, GRAD-09. Source: behaviour of grouped matrix products with alignment.

    >>> padding_rows([4, 0, 2], [3, 0, 0]).int().tolist()
    [0, 0, 0, 1, 1, 1]
    """
    padding: list[bool] = []
    for count, rows in zip(counts_N, rows_N, strict=True):
        if not 0 <= rows <= count:
            raise ValueError(f"{rows} rows do not fit into a segment of {count}")
        padding += [False] * rows + [True] * (count - rows)
    return torch.tensor(padding, dtype=torch.bool)  # (R,)
