"""Overload: how many routed pairs one rank got, against what perfect balance would give it.

An entry is one forward pass of one layer for one microbatch through one exchange group (the ep * etp ranks
that share all experts). Its factor is a ratio of two counts of pairs, exact in fractions. What becomes of
many entries is in `overload_report.py`, what is in flight at once in `overload_timelines.py`.

Sources: arithmetic: the largest of several counts is never below their mean; behaviour of Megatron-Core's
overload factor log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One entry: a_ir of every rank of its exchange group, and b_i, what each would have under balance."""

    stage: int
    layer: int | None
    pairs: tuple[int, ...]
    balanced: Fraction


def entry(
    ids_by_rank: Sequence[Tensor],
    held_by_rank: Sequence[Sequence[int]],
    *,
    ep: int,
    stage: int = 0,
    layer: int | None = 0,
    padding_by_rank: Sequence[Tensor | None] | None = None,
    copies: Sequence[Sequence[int]] = (),
) -> Entry:
    """Count what one exchange group does in one entry (LOAD-01 to LOAD-05, LOAD-09).

    Args:
        ids_by_rank: of every rank of the group, int64 (T, K) ids that dispatch received, -1 = dropped.
        held_by_rank: of every rank of the group, the experts of which it holds all or a shard.
        ep: over how many ranks the experts are spread; the group has ep * etp.
        stage: index of the pipeline stage.
        layer: global number of the layer, None if the pass has none.
        padding_by_rank: of every rank, bool (T,), True = padding, or None.
        copies: sets of ranks, as positions in the group, that hold the same tokens (over tp, say).

    Rule: a_r counts the pairs of real tokens whose expert rank r holds; every etp shard counts the pair.
    b = K (all real tokens of the group) / ep. Of copies, the first rank of the set brings the tokens.

    Degenerate: a dropped slot (-1) counts in no a_r and stays in b. A rank with padding only brings nothing,
    and what its ids hold is not looked at. No token in the group: b = 0.

    Raises:
        ValueError: an expert held by another number of ranks than etp, a pair that no rank holds, copies
            that differ, shapes or numbers of ranks that do not fit.

    Decides: LOAD-02, LOAD-03, LOAD-04, LOAD-05, LOAD-19. Source: arithmetic.

    >>> hot, cold = torch.tensor([[0, 1], [0, -1], [1, 0]]), torch.tensor([[3, 0]])
    >>> entry([hot, cold], [[0, 1], [2, 3]], ep=2)
    Entry(stage=0, layer=0, pairs=(6, 1), balanced=Fraction(4, 1))
    >>> entry([hot, cold], [[0, 1, 2, 3], [0, 1, 2, 3]], ep=1).balanced  # etp = 2: both hold a shard
    Fraction(8, 1)
    """
    W = len(ids_by_rank)
    if W == 0 or ep < 1 or W % ep:
        raise ValueError(f"an exchange group of {W} ranks cannot have ep = {ep}")
    masks = [None] * W if padding_by_rank is None else padding_by_rank
    if not len(held_by_rank) == len(masks) == W:
        raise ValueError(f"{W} ids, {len(held_by_rank)} lists of experts and {len(masks)} paddings: one per rank")
    holders = Counter(expert for held in held_by_rank for expert in held)
    for held in held_by_rank:
        if len(set(held)) != len(held) or any(holders[expert] != W // ep for expert in held):
            raise ValueError(f"etp = {W // ep} ranks must list each expert once: {[list(h) for h in held_by_rank]}")
    padding = [
        torch.zeros(len(ids_TK), dtype=torch.bool) if mask_T is None else mask_T
        for ids_TK, mask_T in zip(ids_by_rank, masks, strict=True)
    ]
    rows = [_real(ids_TK, mask_T) for ids_TK, mask_T in zip(ids_by_rank, padding, strict=True)]
    K = ids_by_rank[0].shape[1]
    if K == 0 or any(ids_TK.shape[1] != K for ids_TK in ids_by_rank):
        raise ValueError(f"ids have {[ids_TK.shape[1] for ids_TK in ids_by_rank]} slots; all ranks need one K >= 1")
    silent = _silent(copies, rows, padding)
    tokens = [ids_K for s, real in enumerate(rows) if s not in silent for ids_K in real]
    routed = Counter(e for ids_K in tokens for e in ids_K if e != -1)
    if any(e < -1 or holders[e] == 0 for e in routed):
        raise ValueError(f"ids {sorted(routed)} name an expert that no rank of the group holds: {sorted(holders)}")
    pairs = tuple(sum(routed[e] for e in held) for held in held_by_rank)
    return Entry(stage, layer, pairs, Fraction(K * len(tokens), ep))


def factor(entry: Entry) -> Fraction:
    """Give the overload factor o_i = max_r a_ir / b_i of an entry (LOAD-01).

    Degenerate: b_i = 0 (no token in the group) gives 0, one of the two allowed readings: the other leaves the
    entry out (`overload_report.reported`). With drops it may be below 1.

    Decides: LOAD-01. Source: arithmetic.

    >>> factor(Entry(0, 0, (6, 1), Fraction(4))), factor(Entry(0, 0, (0, 0), Fraction(0)))
    (Fraction(3, 2), Fraction(0, 1))
    """
    if not entry.pairs or min(entry.pairs) < 0 or entry.balanced < 0:
        raise ValueError(f"{entry} needs a count of pairs, none negative, for every rank of its group")
    if entry.balanced == 0 and max(entry.pairs) > 0:
        raise ValueError(f"{entry} has pairs without a token")
    return max(entry.pairs) / entry.balanced if entry.balanced else Fraction(0)


def _real(ids_TK: Tensor, padding_T: Tensor) -> list[list[int]]:
    """List the ids of the tokens that are not padding."""
    if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
        raise ValueError(f"ids are {ids_TK.dtype} of shape {tuple(ids_TK.shape)}, not int64 (T, K)")
    if padding_T.dtype != torch.bool or padding_T.shape != ids_TK.shape[:1]:
        raise ValueError(f"padding is {padding_T.dtype} of shape {tuple(padding_T.shape)}, not bool (T,)")
    rows: list[list[int]] = ids_TK[~padding_T].tolist()
    return rows


def _silent(copies: Sequence[Sequence[int]], rows: Sequence[list[list[int]]], padding: Sequence[Tensor]) -> set[int]:
    """Find the ranks whose tokens another one already brings."""
    named = [s for copy in copies for s in copy]
    if not all(copies) or len(set(named)) != len(named) or any(not 0 <= s < len(rows) for s in named):
        raise ValueError(f"copies {copies} must be sets of ranks 0..{len(rows) - 1}, no rank in two")
    for first, *others in copies:
        for s in others:
            if rows[first] != rows[s] or not torch.equal(padding[first], padding[s]):
                raise ValueError(f"ranks {first} and {s} of the group do not hold copies of the same tokens")
    return {s for _, *others in copies for s in others}
