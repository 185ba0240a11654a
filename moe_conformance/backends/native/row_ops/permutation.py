"""From tokens to one row per (token, expert) pair, sorted by expert, and back.

T tokens, K slots per token, E experts, D hidden, P pairs: the filled slots of all tokens. The same four
functions serve the exchanges (tokens and their routing) and the experts (received rows and their ids).

Rounding, in any float dtype: a row times its weight is computed in the wider of the two dtypes and rounded
once to the row's; sums over the slots of a token (outputs forward, input gradients backward) are `torch.sum`
over a dimension: deterministic, in float32 inside for bf16 and fp16, rounded once. Empty slots add exact
zeros, whatever their weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """The filled slots of a (T, K) table of expert ids: by expert, then token, then slot."""

    token_P: Tensor
    slot_P: Tensor
    counts_E: Tensor  # pairs of each expert
    shape: tuple[int, int]  # T, K


def sort_pairs(ids_TK: Tensor, experts: int) -> Pairs:
    """Return the filled slots in order: ids below 0 are empty, and an expert twice in a row is two pairs.

    Raises:
        ValueError: an id is not below the number of experts.

    Implements: EXCH-06, EXCH-21, EXCH-42.
    """
    T, K = ids_TK.shape
    token_P, slot_P = (ids_TK >= 0).nonzero(as_tuple=True)  # in the order of tokens, then slots
    ids_P = ids_TK[token_P, slot_P]
    counts_E = torch.bincount(ids_P, minlength=experts)
    if len(counts_E) > experts:
        raise ValueError(f"expert id {len(counts_E) - 1} among {experts} experts")
    order_P = ids_P.argsort(stable=True)
    return Pairs(token_P[order_P], slot_P[order_P], counts_E, (T, K))


def first_of(pairs: Pairs, number: int) -> Pairs:
    """Return that many pairs from the front, or all: the last experts go short."""
    before_E = pairs.counts_E.cumsum(0) - pairs.counts_E
    counts_E = (number - before_E).clamp_min(0).minimum(pairs.counts_E)
    return replace(pairs, token_P=pairs.token_P[:number], slot_P=pairs.slot_P[:number], counts_E=counts_E)


def permute(x_TD: Tensor, pairs: Pairs) -> Tensor:
    """Return rows_PD, the token of every pair.

    It reads from a (T, K, D) view, not from x itself, so that the backward sums over the slots in order and
    in one rounding; a scatter-add into (T, D) would round at every step, and in any order on CUDA.

    Raises:
        ValueError: x has another number of tokens than the table of ids.

    Implements: EXCH-02, GRAD-02.
    """
    T, K = pairs.shape
    if len(x_TD) != T:
        raise ValueError(f"{len(x_TD)} tokens, but ids for {T}")
    return x_TD.unsqueeze(1).expand(T, K, -1)[pairs.token_P, pairs.slot_P]


def unpermute(rows_PD: Tensor, pairs: Pairs) -> Tensor:
    """Return y_TD, the sum of every token's pairs; zeros for a token without any.

    Implements: DROP-10, EXCH-05, EXCH-06.
    """
    T, K = pairs.shape
    table_TKD = rows_PD.new_zeros(T, K, rows_PD.shape[1])
    return table_TKD.index_put((pairs.token_P, pairs.slot_P), rows_PD).sum(1)


def weigh(rows_PD: Tensor, weights_P: Tensor) -> Tensor:
    """Return every row times its weight, in the rows' dtype.

    Implements: EXCH-16, GRAD-01, GRAD-03.
    """
    return (rows_PD * weights_P.unsqueeze(1)).to(rows_PD.dtype)
