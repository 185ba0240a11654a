"""Hot blocks by hand: which rank, node or expert a forced routing overloads, and by how much.

A block is a list of experts: of one rank or of one node. Told token by token: each points at the blocks that it
overloads as far as it can, and a block is hot when all point at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.forcing.second.routes import balanced, check_ids

Ints = NDArray[np.int64]
Blocks = Sequence[Sequence[int]]


def check_routes(ids_by_rank: Sequence[Ints], blocks: Blocks) -> None:
    """Refuse blocks that are no division of the experts, and ids that are no choice among these."""
    dealt = sorted(expert for block in blocks for expert in block)
    if not blocks or not all(len(block) for block in blocks) or dealt != list(range(len(dealt))):
        raise ValueError(f"blocks {blocks}")
    for ids_TK in ids_by_rank:
        check_ids(ids_TK, len(dealt))


def hot_blocks(ids_by_rank: Sequence[Ints], blocks: Blocks, *, even: bool = False) -> list[int]:
    """Blocks that every token fills as far as it can: its K experts are there, or else the whole block is chosen."""
    check_routes(ids_by_rank, blocks)
    hot = list(range(len(blocks)))
    for ids_TK in ids_by_rank:
        for row in ids_TK.tolist():
            pointed = []
            for h, block in enumerate(blocks):
                all_slots_there = all(expert in block for expert in row)
                whole_block_chosen = all(expert in row for expert in block)
                if all_slots_there or whole_block_chosen:
                    pointed.append(h)
            hot = [h for h in hot if h in pointed]
        if even:
            named = [expert for row in ids_TK.tolist() for expert in row]
            hot = [h for h in hot if balanced([named.count(expert) for expert in blocks[h]])]
    return hot


def hot_experts(ids_by_rank: Sequence[Ints], experts: int) -> list[int]:
    """Experts that every token chose, the others being loaded evenly by each rank."""
    if experts < 1:
        raise ValueError("no experts")
    hot = hot_blocks(ids_by_rank, [[expert] for expert in range(experts)])
    for ids_TK in ids_by_rank:
        named = [expert for row in ids_TK.tolist() for expert in row]
        hot = [h for h in hot if balanced([named.count(other) for other in range(experts) if other != h])]
    return hot


def overload(top_k: int, experts: int, block: int) -> float:
    """Load of a hot block over the mean of all blocks of its size: their number, or fewer where K overflows it."""
    if not 1 <= top_k <= experts or not 1 <= block <= experts:
        raise ValueError(f"{top_k}, {experts}, {block}")
    return experts / block if top_k <= block else experts / top_k


def first_hot_ranks(ids_by_forward: Sequence[Sequence[Ints]], blocks: Blocks) -> list[int]:
    """The ranks that may have been hot in the first forward, if each next forward moves on to the next rank."""
    check_routes([], blocks)
    possible = []
    for first in range(len(blocks)):
        rank, legal = first, True
        for ids_by_rank in ids_by_forward:
            legal = legal and rank in hot_blocks(ids_by_rank, blocks)
            rank = 0 if rank == len(blocks) - 1 else rank + 1
        if legal:
            possible.append(first)
    return possible


def hot_by_ratio(ids_by_rank: Sequence[Ints], blocks: Blocks, ratio: float) -> list[int]:
    """Ranks that get `ratio` times what each other rank gets, less than one row a source rank apart.

    With a rows for each other rank, ratio a + (ep - 1) a = K S are all rows there are.
    """
    check_routes(ids_by_rank, blocks)
    held = len(blocks[0])
    if not 1.0 <= ratio < float("inf") or any(len(block) != held for block in blocks):
        raise ValueError(f"ratio {ratio}, blocks {blocks}")
    rows = sum(ids_TK.size for ids_TK in ids_by_rank)
    most = sum(min(held, ids_TK.shape[1]) for ids_TK in ids_by_rank for _ in ids_TK)
    wanted = Fraction(ratio) * (rows / (Fraction(ratio) + len(blocks) - 1))
    if wanted > most:
        return hot_blocks(ids_by_rank, blocks)
    hot = []
    for h in range(len(blocks)):
        received, even = 0, True
        for ids_TK in ids_by_rank:
            named = [expert for row in ids_TK.tolist() for expert in row]
            sent = [sum(named.count(expert) for expert in block) for block in blocks]
            received += sent[h]
            even = even and balanced(sent[:h] + sent[h + 1 :])
        if even and (received == wanted or abs(received - wanted) < len(ids_by_rank)):
            hot.append(h)
    return hot


def mean_overload(loads_by_draw: Sequence[Sequence[int]], blocks: Blocks) -> Fraction:
    """Mean over draws of the largest load of a rank over the mean load of the ranks, as an exact fraction."""
    check_routes([], blocks)
    if not loads_by_draw:
        raise ValueError("no draw")
    total = Fraction(0)
    for loads_E in loads_by_draw:
        by_rank = [sum(int(loads_E[expert]) for expert in block) for block in blocks]
        if sum(by_rank) == 0:
            raise ValueError("a draw without load")
        total += Fraction(max(by_rank) * len(blocks), sum(by_rank))
    return total / len(loads_by_draw)


def imbalance_rises(loads_by_deviation: Sequence[Sequence[Sequence[int]]], blocks: Blocks) -> bool:
    """Whether each deviation overloads a rank more, none as badly as the worst case, and no rise is half the last."""
    if len(loads_by_deviation) < 2:
        raise ValueError("nothing to compare")
    means = [mean_overload(loads_by_draw, blocks) for loads_by_draw in loads_by_deviation]
    rising = all(means[i] < means[i + 1] for i in range(len(means) - 1))
    for i in range(2, len(means)):
        rising = rising and 2 * (means[i] - means[i - 1]) >= means[i - 1] - means[i - 2]
    return len(blocks) == 1 or (rising and all(mean < len(blocks) for mean in means))
