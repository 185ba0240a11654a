"""Packed rows: which rows of a packed tensor are tokens.

Rows in the gaps between packed sequences (`packed_sequences.py`) are no tokens: they are routed
nowhere, count nowhere and change no gradient.

Sources: behaviour of Transformer Engine with packed sequences (thd); arithmetic.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def real_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, rows: int | None = None) -> Tensor:
    """Tell tokens from gaps, bool (R,): row j is real iff it is one of the first L_i rows of some sequence i.

    Args:
        cu_seqlens: integers (S + 1,), sums of real lengths.
        cu_seqlens_padded: integers (S + 1,), sums of padded lengths.
        rows: R, by default the last of cu_seqlens_padded; what comes after the last sequence is a gap.

    Degenerate: only sequences of length 0, or none: gaps alone. Its negation is the padding mask of losses.

    Raises:
        ValueError: lists that are empty, of different lengths, not from 0 or descending; L_i > P_i; R too small.

    Decides: PACK-08. Source: definition of padding.

    >>> real_rows(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 5]), 7).int().tolist()
    [1, 1, 0, 0, 1, 0, 0]
    """
    real, padded = cu_seqlens.tolist(), cu_seqlens_padded.tolist()
    if len(real) != len(padded) or not real or real[0] != 0 or padded[0] != 0:
        raise ValueError(f"{real} and {padded} are no two lists of S + 1 sums that start at 0")
    R = padded[-1] if rows is None else rows
    if padded[-1] > R:
        raise ValueError(f"the sequences take {padded[-1]} rows, but there are {R}")
    lengths = [after - before for before, after in pairwise(real)]
    for i, (first, end) in enumerate(pairwise(padded)):
        if not 0 <= lengths[i] <= end - first:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens in {end - first} rows")
    real_R = torch.zeros(R, dtype=torch.bool)  # (R,)
    for first, length in zip(padded, lengths, strict=False):  # the last sum begins no sequence
        real_R[first : first + length] = True
    return real_R
