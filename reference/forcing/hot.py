"""Hot spots: routes forced onto one rank, one node or one expert.

A block is the experts of one rank, of one node, or one expert alone. The strategies say which block is
hot, not which of its experts a token gets: each function lists the blocks that a given route may have
meant, and the route is allowed if there is one.

Sources: arithmetic, a token selects each expert at most once; behaviour of DeepEP's unbalanced scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from torch import Tensor

from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.forcing.routes import balanced, legal_ids

Blocks = Sequence[Sequence[int]]
"""Of every rank or node its global expert ids; each of the E experts in exactly one."""


def hot_blocks(ids_by_rank: Sequence[Tensor], blocks: Blocks, *, even: bool = False) -> tuple[int, ...]:
    """List the blocks that every token of every source rank selects as often as it can.

    Args: int64 (T_r, K) ids of each source rank. `even` for a node of several ranks.

    Rule: each token has min(K, B) of its experts in a block of B; if `even`, each source rank's loads of
    the block's experts differ by at most 1. The other slots are free.

    Degenerate: without tokens every block fits. Blocks of equal size fit all if K = E, or if there is but
    one. Raises on ids that are no route, and on blocks that do not hold each expert once.

    Decides: FORCE-09, FORCE-14. Source: arithmetic.

    >>> import torch
    >>> one, other = torch.tensor([[2, 3, 0], [3, 2, 1]]), torch.tensor([[5, 2, 3]])
    >>> hot_blocks([one, other], [[0, 1], [2, 3], [4, 5]]), hot_blocks([one, other], [[0, 1, 2, 3], [4, 5]])
    ((1,), ())
    """
    E = experts_of(blocks)
    for ids_TK in ids_by_rank:
        _check(ids_TK, E)
    hot = []
    for h, block in enumerate(blocks):
        full = all(
            len(set(ids_K) & set(block)) == min(len(ids_K), len(block))
            for ids_TK in ids_by_rank
            for ids_K in ids_TK.tolist()
        )
        spread = all(balanced(loads(ids_TK, E)[list(block)]) for ids_TK in ids_by_rank)
        if full and (spread or not even):
            hot.append(h)
    return tuple(hot)


def hot_experts(ids_by_rank: Sequence[Tensor], experts: int) -> tuple[int, ...]:
    """List the experts that every token of every source rank selects, while its other slots are even.

    Rule: n_h = T on each rank, and each rank's loads of the others differ by at most 1.

    Degenerate: K = 1 leaves the others 0; K = E makes every expert hot; so does T = 0.

    Decides: FORCE-13. Source: arithmetic, no expert can have more than one slot of each token.

    >>> import torch
    >>> hot_experts([torch.tensor([[1, 0], [2, 1]]), torch.tensor([[1, 3]])], 4)
    (1,)
    >>> hot_experts([torch.tensor([[1, 0], [0, 1]])], 4)
    ()
    """
    hot = []
    for h in hot_blocks(ids_by_rank, [[e] for e in range(experts)]):
        others = [e for e in range(experts) if e != h]
        if not others or all(balanced(loads(ids_TK, experts)[others]) for ids_TK in ids_by_rank):
            hot.append(h)
    return tuple(hot)


def first_hot_ranks(ids_by_forward: Sequence[Sequence[Tensor]], blocks: Blocks) -> tuple[int, ...]:
    """List the ranks h0 from which the hot rank may have gone round, one on in each forward.

    Args: of each forward i = 0, 1, ... the ids of each source rank.

    Rule: (h0 + i) mod ep is a hot block of forward i, for all i. Degenerate: a forward without tokens counts
    and fits; ep = 1 gives (0,). A forward that is run again is not another one: leave it out.

    Decides: FORCE-15. Source: arithmetic.

    >>> import torch
    >>> zero, one = [torch.tensor([[0, 1]])], [torch.tensor([[2, 3]])]
    >>> first_hot_ranks([one, zero, one], [[0, 1], [2, 3]]), first_hot_ranks([one, one], [[0, 1], [2, 3]])
    ((1,), ())
    """
    experts_of(blocks)
    ep = len(blocks)
    hot_by_forward = [hot_blocks(ids_by_rank, blocks) for ids_by_rank in ids_by_forward]
    return tuple(h0 for h0 in range(ep) if all((h0 + i) % ep in hot for i, hot in enumerate(hot_by_forward)))


def hot_by_ratio(ids_by_rank: Sequence[Tensor], blocks: Blocks, ratio: float) -> tuple[int, ...]:
    """List the ranks that may have been loaded with `ratio` times what each other rank gets.

    Rule: of K S rows the hot rank gets a = rho K S / (rho + ep - 1) but for rounding, on each source rank by
    itself at the finest: within W of a, the number of source ranks, and not W itself. Each source rank's
    rows of the other ranks differ by at most 1. A rho that asks for more than S min(K, N) is `hot_blocks`.

    Degenerate: ep = 1 has all rows; rho = 1 is balanced over ranks; S = 0 fits every rank. Raises on
    rho < 1, and on blocks of different sizes.

    Decides: FORCE-21. Source: arithmetic, rho b + (ep - 1) b = K S; behaviour of DeepEP's unbalanced scores.

    >>> import torch
    >>> ids = torch.tensor([[0], [1], [2], [3], [0], [1]])  # 4 rows for rank 0, one for each other
    >>> [hot_by_ratio([ids], [[0, 1], [2, 4], [3, 5]], rho) for rho in (4.0, 2.0)]
    [(0,), ()]
    """
    E, ep, N = experts_of(blocks), len(blocks), len(blocks[0])
    if not isfinite(ratio) or ratio < 1 or any(len(block) != N for block in blocks):
        raise ValueError(f"ratio {ratio} over blocks {list(blocks)}: need a finite ratio >= 1, blocks of one size")
    rows_by_rank = []  # of every source rank, its rows for each block
    for ids_TK in ids_by_rank:
        _check(ids_TK, E)
        rows_by_rank.append([int(loads(ids_TK, E)[list(block)].sum()) for block in blocks])
    total = sum(ids_TK.numel() for ids_TK in ids_by_rank)  # K S
    wanted = Fraction(ratio) * total / (Fraction(ratio) + ep - 1)
    if wanted > sum(len(ids_TK) * min(ids_TK.shape[1], N) for ids_TK in ids_by_rank):
        return hot_blocks(ids_by_rank, blocks)
    hot = []
    for h in range(ep):
        rows = sum(rows_R[h] for rows_R in rows_by_rank)
        others_by_rank = [rows_R[:h] + rows_R[h + 1 :] for rows_R in rows_by_rank]
        even = all(max(others) - min(others) <= 1 for others in others_by_rank if others)
        if even and (rows == wanted or abs(rows - wanted) < len(ids_by_rank)):
            hot.append(h)
    return tuple(hot)


def experts_of(blocks: Blocks) -> int:
    """Count the experts of all blocks; raise unless they are 0..E-1, once each, and no block is empty."""
    listed = sorted(e for block in blocks for e in block)
    if not listed or listed != list(range(len(listed))) or not all(blocks):
        raise ValueError(f"blocks {list(blocks)} do not hold the experts 0..E-1 once each, at least one in each")
    return len(listed)


def _check(ids_TK: Tensor, experts: int) -> None:
    """Raise on a token without a route."""
    if not bool(legal_ids(ids_TK, experts).all()):
        raise ValueError(f"a token's ids are not different experts of {experts}: {ids_TK.tolist()}")
