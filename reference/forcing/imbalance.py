"""Imbalance: how uneven hot routes are, and routes by a random bias.

Sources: arithmetic, a token selects each expert at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from torch import Tensor

from moe_conformance.reference.forcing.hot import Blocks, experts_of


def overload(top_k: int, experts: int, block: int) -> float:
    """Divide the load of a hot block of B experts by the mean load of E / B such blocks.

    Rule: S min(K, B) rows over K S B / E, so E / B if K <= B, else E / K. Degenerate: one block, or K = E,
    gives 1.

    A hot rank has B = N (ep or E / K), a hot expert B = 1 (E / K), a hot node of q ranks B = q N. Source: arithmetic.

    >>> overload(2, 12, 3), overload(6, 12, 3), overload(2, 12, 1)
    (4.0, 2.0, 6.0)
    """
    if not 1 <= top_k <= experts or not 1 <= block <= experts:
        raise ValueError(f"K = {top_k}, B = {block} of E = {experts}: need both in 1..E")
    return min(top_k, block) * experts / (top_k * block)


def mean_overload(loads_by_draw: Sequence[Tensor], blocks: Blocks) -> float:
    """Average over draws the largest load of a rank over the mean, given int64 (E,) loads of each draw.

    Raises on no draw, and on one without load. Decides: FORCE-22. Source: arithmetic.

    >>> import torch
    >>> mean_overload([torch.tensor([1, 1, 4]), torch.tensor([1, 1, 2])], [[0, 1], [2]])
    1.1666666666666667
    """
    experts_of(blocks)
    if not loads_by_draw or not all(int(loads_E.sum()) > 0 for loads_E in loads_by_draw):
        raise ValueError("no draw, or one without load, has no mean load to divide by")
    ratios = []
    for loads_E in loads_by_draw:
        rows = [int(loads_E[list(block)].sum()) for block in blocks]
        ratios.append(Fraction(max(rows) * len(rows), sum(rows)))
    return float(sum(ratios) / len(ratios))


def imbalance_rises(loads_by_deviation: Sequence[Sequence[Tensor]], blocks: Blocks) -> bool:
    """Return whether the mean overload rises with each deviation, at least half as much as before, and is below ep.

    Chance alone makes a mean of draws larger than another. Args: of each deviation, ascending (0, 0.5, 2, where
    rises of 0.34 and 0.76 are expected), the loads of every draw. Degenerate: ep = 1 is always 1,
    and has nothing to rise. Raises on fewer than two deviations.

    Decides: FORCE-22. Source: arithmetic, a bias cannot reach the worst case by itself.

    >>> import torch
    >>> flat, steep = [torch.tensor([2, 2, 2])], [torch.tensor([1, 1, 4])]
    >>> imbalance_rises([flat, steep], [[0, 1], [2]]), imbalance_rises([steep, steep], [[0, 1], [2]])
    (False, False)
    """
    if len(loads_by_deviation) < 2:
        raise ValueError(f"{len(loads_by_deviation)} deviations: from one to none nothing can rise")
    ep = len(blocks)
    means = [mean_overload(loads_by_draw, blocks) for loads_by_draw in loads_by_deviation]
    rises = [higher - lower for lower, higher in pairwise(means)]
    enough = all(later >= before / 2 for before, later in pairwise(rises))
    return ep == 1 or (min(rises) > 0 and enough and max(means) < ep)
