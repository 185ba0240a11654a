"""Packing: to what size the ranks of a group pad their token counts.

Some exchanges need the same number of rows on every rank of a group. The ranks take the largest of their
token counts, and round it up to what the kernel asks for. Packed sequences are in `packed_sequences.py`,
their shares under context parallelism in `context_shares.py`, configured bounds in `padding_bounds.py`.

Sources: arithmetic; behaviour of Megatron-Core with HybridEP under uneven inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 64
"""Rows of which a padded count is a multiple: what HybridEP's kernels ask for. Others state their own."""


def aligned(count: int, *, alignment: int = ALIGNMENT) -> int:
    """Round a number of rows up to a multiple of the alignment: A ceil(count / A).

    Degenerate: 0 stays 0, a multiple stays itself, an alignment of 1 rounds nothing.

    Raises:
        ValueError: a negative count, or an alignment below 1.

    Decides: PACK-01, PACK-02. Source: arithmetic.

    >>> [aligned(count) for count in (0, 1, 64, 65, 70)]
    [0, 64, 64, 128, 128]
    """
    if count < 0 or alignment < 1:
        raise ValueError(f"{count} rows with alignment {alignment}: need a count >= 0 and an alignment >= 1")
    return -(-count // alignment) * alignment


def padded_counts(
    tokens_by_rank: Sequence[int],
    exchange_groups: Sequence[Sequence[int]],
    *,
    alignment: int = ALIGNMENT,
    needs_a_row: bool = False,
) -> tuple[int, ...]:
    """Compute P of every rank: the largest token count of its group, rounded up to the alignment.

    Args:
        tokens_by_rank: T of every rank, in one microbatch. Another microbatch has counts of its own.
        exchange_groups: of every ep x etp group, its ranks; each rank is in exactly one.
        alignment: A, one value for all.
        needs_a_row: the kernel cannot run without a row; a group without any token then pads to A.

    Degenerate: no token in the whole group: 0, or A with `needs_a_row`. A rank with T = 0 among others pads
    P rows. A group of one rank has its own T as maximum, and still rounds it up.

    Raises:
        ValueError: a negative count, an alignment below 1, groups that do not hold each rank once.

    Decides: PACK-01. Source: all members of one buffer see one size.

    >>> padded_counts([70, 0, 3, 64], [[0, 1], [3, 2]])
    (128, 128, 64, 64)
    >>> padded_counts([0, 0, 5], [[0, 1], [2]], alignment=4, needs_a_row=True)
    (4, 4, 8)
    """
    check_groups(tokens_by_rank, exchange_groups)
    counts = [0] * len(tokens_by_rank)
    for group in exchange_groups:
        largest = max(tokens_by_rank[rank] for rank in group)
        rows = aligned(largest, alignment=alignment)
        if rows == 0 and needs_a_row:
            rows = alignment
        for rank in group:
            counts[rank] = rows
    return tuple(counts)


def check_groups(tokens_by_rank: Sequence[int], exchange_groups: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless no count is negative and each rank is in exactly one group, none empty.

    >>> check_groups([3, 1, 2], [[0, 2], [1]])
    """
    if min(tokens_by_rank, default=0) < 0:
        raise ValueError(f"a rank cannot have {min(tokens_by_rank)} tokens: {list(tokens_by_rank)}")
    ranks = sorted(rank for group in exchange_groups for rank in group)
    if ranks != list(range(len(tokens_by_rank))) or not all(exchange_groups):
        groups = [list(group) for group in exchange_groups]
        raise ValueError(f"each of {len(tokens_by_rank)} ranks must be in exactly one of the groups {groups}")
