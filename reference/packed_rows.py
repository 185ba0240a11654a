"""Packed rows: what stands where in a packed tensor, and what the layer makes of the gaps.

Rows in the gaps between packed sequences (`packed_sequences.py`) are no tokens: they are routed
nowhere, count nowhere and change no gradient.

Sources: behaviour of Transformer Engine with packed sequences (thd); arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from reference import layer
from reference.experts import Expert
from reference.routing import Routed


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


def pack(sequences: Sequence[Tensor], lengths_padded: Sequence[int], *, fill: float = 0) -> Tensor:
    """Put sequences (L_i, ...) one after the other, each in P_i rows of which the last hold `fill`.

    Values are moved, never cast. Ids are filled with -1.

    Degenerate: a sequence of length 0 adds its P_i rows of fill, most often none.

    Raises:
        ValueError: no sequence (nothing tells the shape of a row), other numbers of lengths, P_i < L_i.

    Decides: PACK-07, PACK-09. Source: behaviour of Transformer Engine (thd).

    >>> pack([torch.tensor([1, 2]), torch.tensor([3])], [3, 1], fill=-1).tolist()
    [1, 2, -1, 3]
    """
    if not sequences or len(sequences) != len(lengths_padded):
        raise ValueError(f"{len(sequences)} sequences, {len(lengths_padded)} padded lengths: need as many, one or more")
    parts = []
    for i, (sequence, rows) in enumerate(zip(sequences, lengths_padded, strict=True)):
        gap = rows - sequence.shape[0]
        if gap < 0:
            raise ValueError(f"sequence {i} of {sequence.shape[0]} tokens does not fit into {rows} rows")
        parts += [sequence, torch.full((gap, *sequence.shape[1:]), fill, dtype=sequence.dtype)]
    return torch.cat(parts)  # (R, ...)


def unpack(packed: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, ...]:
    """Take the sequences out of a packed tensor, (R, ...) -> S of (L_i, ...), gaps left behind.

    Rule: sequence i is the L_i rows from cu_seqlens_padded[i]. The inverse of `pack`, for any packing; so two
    packings of the same sequences compare sequence by sequence.

    Raises:
        ValueError: as `real_rows`.

    Decides: PACK-07, PACK-09, PACK-10. Source: behaviour of Transformer Engine (thd).

    >>> parts = unpack(torch.tensor([1, 2, -1, 3]), torch.tensor([0, 2, 2, 3]), torch.tensor([0, 3, 3, 4]))
    >>> [part.tolist() for part in parts]
    [[1, 2], [], [3]]
    """
    real_rows(cu_seqlens, cu_seqlens_padded, packed.shape[0])
    lengths = cu_seqlens.diff().tolist()
    return tuple(
        packed[first : first + length] for first, length in zip(cu_seqlens_padded.tolist()[:-1], lengths, strict=True)
    )


def route_gaps_nowhere(ids_RK: Tensor, weights_RK: Tensor, real_R: Tensor) -> Routed:
    """Empty every slot of the rows that are no token: id -1, weight 0 with gradient 0.

    Degenerate: no gaps changes nothing; gaps alone are a rank without tokens. A NaN at a gap is gone.

    Raises:
        ValueError: shapes that do not fit, or a mask that is not boolean.

    Decides: PACK-03, PACK-08. Source: a token that does not exist has no routed slot.

    >>> routed = route_gaps_nowhere(torch.tensor([[3], [4]]), torch.ones(2, 1), torch.tensor([True, False]))
    >>> routed.ids_TK.tolist(), routed.weights_TK.tolist()
    ([[3], [-1]], [[1.0], [0.0]])
    """
    R = ids_RK.shape[0]
    if weights_RK.shape != ids_RK.shape or real_R.shape != (R,) or real_R.dtype != torch.bool:
        shapes = f"ids {tuple(ids_RK.shape)}, weights {tuple(weights_RK.shape)}, rows {tuple(real_R.shape)}"
        raise ValueError(f"{shapes} of {real_R.dtype}: need (R, K), (R, K) and booleans (R,)")
    real_R1 = real_R[:, None]  # (R, 1)
    return Routed(torch.where(real_R1, ids_RK, -1), torch.where(real_R1, weights_RK.double(), 0.0))


def packed_forward(x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor, expert: Expert, real_R: Tensor) -> Tensor:
    """Compute the layer's routed output on packed rows, (R, D) -> (R, D), differentiable in all but the ids.

    Rule: `layer.forward` with every gap routed nowhere: a token gets what it would get alone, in whatever pack
    and place. Gaps get 0 and gradient 0, whatever x holds there, NaN included.

    Raises:
        ValueError: as `route_gaps_nowhere`.

    Decides: PACK-08, PACK-09, PACK-10. Source: the layer is a sum per token.

    >>> x, real = torch.tensor([[1.0, 2.0], [torch.nan, 5.0]]), torch.tensor([True, False])
    >>> packed_forward(x, torch.zeros(2, 1).long(), torch.ones(2, 1), lambda rows, e: rows + 1, real).tolist()
    [[2.0, 3.0], [0.0, 0.0]]
    """
    routed = route_gaps_nowhere(ids_RK, weights_RK, real_R)
    return layer.forward(x_RD, routed.ids_TK, routed.weights_TK, expert)  # (R, D)
