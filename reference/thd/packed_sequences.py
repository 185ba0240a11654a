"""Packed sequences: several sequences one after the other in one tensor (THD), with gaps between them.

Context and sequence parallelism cut every sequence into equal parts, so each gets rows up to a multiple of
the parts. Two lists tell where what is: `cu_seqlens` sums up the real lengths, `cu_seqlens_padded` the rows.
What stands in those rows is in `packed_rows.py`.

Sources: behaviour of Megatron-Core and Transformer Engine with packed sequences (thd); arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.reference.token_padding.padding import aligned

Lengths = Literal["smallest", "larger", "wrong"]


def length_multiple(*, tp: int, cp: int, sequence_parallel: bool) -> int:
    """Compute what padded lengths are multiples of: (2 cp if cp > 1) * (tp if sequence parallel).

    Each cp rank takes two chunks of a sequence, and with sequence parallel tp ranks share its rows.

    Raises:
        ValueError: tp or cp below 1.

    Decides: PACK-07. Source: 2 cp chunks per sequence, tp shares per rank.

    >>> length_multiple(tp=3, cp=2, sequence_parallel=True), length_multiple(tp=3, cp=1, sequence_parallel=False)
    (12, 1)
    """
    if tp < 1 or cp < 1:
        raise ValueError(f"tp = {tp} and cp = {cp} must be positive sizes")
    chunks = 2 * cp if cp > 1 else 1
    shares = tp if sequence_parallel else 1
    return chunks * shares


def padded_lengths(lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Round every length up to the multiple: P_i = m ceil(L_i / m), the smallest that is allowed.

    Degenerate: L_i = 0 gives 0; m = 1 changes nothing; no sequence gives ().

    Raises:
        ValueError: a negative length, or a multiple below 1.

    Decides: PACK-07. Source: arithmetic.

    >>> padded_lengths([5, 0, 4], 4)
    (8, 0, 4)
    """
    return tuple(aligned(length, alignment=multiple) for length in lengths)


def cumulative(lengths: Sequence[int]) -> Tensor:
    """Sum lengths up, int64 (S + 1,): 0, L_0, L_0 + L_1, ...

    Degenerate: a length of 0 gives equal neighbours; no sequence gives [0].

    Raises:
        ValueError: a negative length.

    Decides: PACK-07, PACK-10. Source: definition of cumulative lengths.

    >>> cumulative([5, 0, 4]).tolist(), cumulative(padded_lengths([5, 0, 4], 4)).tolist()
    ([0, 5, 5, 9], [0, 8, 8, 12])
    """
    sums = [0]
    for length in lengths:
        if length < 0:
            raise ValueError(f"a sequence cannot have {length} tokens: {list(lengths)}")
        sums.append(sums[-1] + length)
    return torch.tensor(sums, dtype=torch.int64)  # (S + 1,)


def judge_lengths(lengths: Sequence[int], cu_seqlens: Tensor, cu_seqlens_padded: Tensor, multiple: int) -> Lengths:
    """Judge the two lists that an implementation made of the lengths, both (S + 1,).

    Rule: both start at 0 and have S + 1 entries; cu_seqlens grows by exactly L_i, cu_seqlens_padded by a
    multiple of m that is at least L_i: "smallest" if each is the smallest, else "larger", which is allowed
    and reported. Anything else is "wrong".

    Raises:
        ValueError: a negative length, or a multiple below 1.

    Decides: PACK-07. Source: arithmetic.

    >>> real = cumulative([5, 0, 4])
    >>> [judge_lengths([5, 0, 4], real, cumulative(padded), 4) for padded in ([8, 0, 4], [8, 4, 4], [8, 0, 5])]
    ['smallest', 'larger', 'wrong']
    """
    smallest = padded_lengths(lengths, multiple)
    real, padded = cu_seqlens.tolist(), cu_seqlens_padded.tolist()
    if real != cumulative(lengths).tolist() or len(padded) != len(real) or padded[0] != 0:
        return "wrong"
    grown = [after - before for before, after in pairwise(padded)]
    if any(rows % multiple or rows < least for rows, least in zip(grown, smallest, strict=True)):
        return "wrong"
    return "smallest" if tuple(grown) == smallest else "larger"
