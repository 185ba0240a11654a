"""Packing: padding the ranks' token counts to one size, and cutting the padding off again.

Some exchanges need the same number of rows on every rank of a group. The ranks take the largest of their
token counts, round it up to what the kernel asks for, and append rows that route nowhere. Packed sequences
are in `packed_sequences.py`, their shares under context parallelism in `context_shares.py`, configured
bounds in `padding_bounds.py`.

Sources: arithmetic; behaviour of Megatron-Core with HybridEP under uneven inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from reference import layer
from reference.experts import Expert
from reference.layer import WeightsAt

ALIGNMENT = 64
"""Rows of which a padded count is a multiple: what HybridEP's kernels ask for. Others state their own."""


class Padded(NamedTuple):
    """What a rank hands to the exchange: P rows, the first T of them real."""

    x_PD: Tensor
    ids_PK: Tensor
    weights_PK: Tensor


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


def pad(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, rows: int) -> Padded:
    """Append rows that route nowhere, up to P = `rows`: zeros, with empty slots of weight 0.

    Differentiable in x and in the weights: appending constants passes the gradient of the first T rows on.

    Degenerate: T = P appends nothing; T = 0 gives padding alone.

    Raises:
        ValueError: P < T, or x, ids and weights with different T.

    Decides: PACK-03, PACK-05. Source: a token that does not exist has no routed slot.

    >>> padded = pad(torch.ones(1, 3), torch.tensor([[4, 5]]), torch.ones(1, 2), 2)
    >>> padded.x_PD.tolist(), padded.ids_PK.tolist(), padded.weights_PK.tolist()
    ([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [[4, 5], [-1, -1]], [[1.0, 1.0], [0.0, 0.0]])
    """
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    if ids_TK.shape[0] != T or weights_TK.shape != ids_TK.shape:
        raise ValueError(f"x has {T} tokens, but ids {tuple(ids_TK.shape)} and weights {tuple(weights_TK.shape)}")
    if rows < T:
        raise ValueError(f"{T} tokens do not fit into {rows} rows; padding never cuts")
    empty = rows - T
    return Padded(
        torch.cat([x_TD.double(), torch.zeros(empty, D, dtype=torch.float64)]),  # (P, D)
        torch.cat([ids_TK, torch.full((empty, K), -1, dtype=torch.int64)]),  # (P, K)
        torch.cat([weights_TK.double(), torch.zeros(empty, K, dtype=torch.float64)]),  # (P, K)
    )


def trim(padded_PD: Tensor, lead: Sequence[int]) -> Tensor:
    """Cut a padded output back to the rank's own tokens, (P, D) -> (*lead, D), the first T = prod(lead) rows.

    Differentiable: the gradient of a cut row is zero.

    Degenerate: T = 0 gives no element, in the shape asked for; T = P cuts nothing; a lead of () is one token.

    Raises:
        ValueError: a negative length, or more tokens than rows.

    Decides: PACK-04. Source: definition of padding at the end.

    >>> trim(torch.arange(10.0).reshape(5, 2), (3, 1)).tolist()
    [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]]]
    """
    P, D = padded_PD.shape
    T = prod(lead)
    if min(lead, default=0) < 0 or T > P:
        raise ValueError(f"cannot cut {P} rows to the shape {tuple(lead)}, which has {T} tokens")
    return padded_PD[:T].reshape(*lead, D)  # (*lead, D)


def padded_forward(
    x_LD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    expert: Expert,
    rows: int,
    *,
    weights_at: WeightsAt = "output",
) -> Tensor:
    """Compute the layer's output on padded rows and cut it back, (*lead, D) -> (*lead, D).

    Rule: pad, `layer.forward`, trim; which equals the layer without padding, whatever P is. Differentiable
    in x, weights and expert parameters, with the gradients of the layer without padding. Everything that it
    knows of token counts comes in by its arguments: microbatches in flight cannot disturb each other.

    Degenerate: T = 0 gives an empty output and zero gradients.

    Raises:
        ValueError: as `pad` and `layer.forward`.

    Decides: PACK-04, PACK-05, PACK-06. Source: chain rule.

    >>> x = torch.arange(6.0).reshape(1, 3, 2)
    >>> ids, weights = torch.tensor([[0], [1], [-1]]), torch.ones(3, 1)
    >>> padded_forward(x, ids, weights, lambda rows, e: rows * 10**e + 7, 8).tolist()
    [[[7.0, 8.0], [27.0, 37.0], [0.0, 0.0]]]
    """
    lead, D = x_LD.shape[:-1], x_LD.shape[-1]
    padded = pad(x_LD.reshape(prod(lead), D), ids_TK, weights_TK, rows)
    y_PD = layer.forward(*padded, expert, weights_at=weights_at)  # (P, D)
    return trim(y_PD, lead)  # (*lead, D)


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
