"""Capacity: how many rows of one rank's tokens an expert takes at most.

C = max(C_min, ceil(factor K T / E)), for each rank from its own T. Integers and fractions throughout: what
a float32 implementation may round otherwise is said as a set of allowed capacities.

Sources: GShard section 2.2 (expert capacity), Switch Transformer section 2.2 equation 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, isfinite
from typing import Literal

import torch
from torch import Tensor

FLOAT32_ROUNDING = Fraction(1, 2**24)
"""The largest relative error of one float32 operation."""


def loads(ids_TK: Tensor, experts: int) -> Tensor:
    """Count the slots that selected each expert, int64 (T, K) -> int64 (E,).

    Rule: n_e = |{(t, k): id_tk = e}|. Degenerate: an empty slot (-1) counts nowhere; an expert that no token
    selected has 0, and T = 0 gives zeros. Raises on an id that is neither -1 nor of an expert.

    Decides: FORCE-02, ROUTE-09, ROUTE-22. Source: definition.

    >>> loads(torch.tensor([[2, 0], [-1, 2], [2, 3]]), 5).tolist()
    [1, 0, 3, 1, 0]
    """
    if experts < 1:
        raise ValueError(f"{experts} experts: need at least one")
    counts = Counter(ids_TK.flatten().tolist())
    for e in counts:
        if not -1 <= e < experts:
            raise ValueError(f"id {e} is neither -1 (empty) nor one of {experts} experts")
    return torch.tensor([counts[e] for e in range(experts)], dtype=torch.int64)  # (E,)


def capacities(
    tokens: int,
    top_k: int,
    experts: int,
    *,
    factor: float,
    minimum: int = 0,
    rounding: Literal["up", "down"] = "up",
) -> tuple[int, ...]:
    """List every allowed capacity C of a rank with T tokens, ascending: one, or two that are neighbours.

    Rule: C = max(C_min, ceil(x)) with x = factor K T / E, exactly. Where x is within four float32 roundings
    of a whole number i, both i and i + 1 are allowed, as a correct product may end on either side of i. Not
    so where no order of multiplying and dividing rounds anything: E a power of two, and a K T < 2^24 with
    factor = a / 2^p. There an i + 1 is not rounded up but one too many. A backend that declares that it rounds down
    has floor(x), and i - 1 in place of i + 1.

    Degenerate: x = 0 gives C_min alone; 0 < x < 1 gives 1; a factor below 1 is allowed, and a C above T too.
    Raises on a negative, NaN or infinite factor, T < 0, C_min < 0, or K not in 1..E.

    Decides: DROP-01, DROP-02. Source: Switch Transformer section 2.2 equation 3.

    >>> capacities(10, 3, 8, factor=1.25), capacities(10, 3, 8, factor=1.25, minimum=7)
    ((5,), (7,))
    >>> capacities(8, 3, 4, factor=1.0), capacities(10, 3, 5, factor=1.0)  # 6 exactly; 6 by way of 10 / 5
    ((6,), (6, 7))
    >>> capacities(10, 3, 8, factor=1.25, rounding="down"), capacities(10, 3, 5, factor=1.0, rounding="down")
    ((4,), (5, 6))
    """
    _check_sizes(tokens, top_k, experts)
    if not isfinite(factor) or factor < 0:
        raise ValueError(f"capacity factor {factor} is not a finite number of at least 0")
    if minimum < 0:
        raise ValueError(f"minimum capacity {minimum} is negative")
    exact = Fraction(factor) * top_k * tokens / experts
    whole = round(exact)
    legal = {ceil(exact) if rounding == "up" else floor(exact)}
    if abs(exact - whole) <= 4 * FLOAT32_ROUNDING * exact and not _rounds_nothing(tokens, top_k, experts, factor):
        legal |= {whole, whole + 1} if rounding == "up" else {whole - 1, whole}
    return tuple(sorted({max(minimum, C) for C in legal}))


def lossless_capacity(ids_by_rank: Sequence[Tensor], experts: int, *, minimum: int = 0, multiple: int = 1) -> int:
    """Find the one capacity that drops nothing on any rank of a group that exchanges rows.

    Args: `ids_by_rank` of each rank of the group, int64 (T_r, K), T_r may differ.

    Rule: the largest n_re over ranks r and experts e, all K choices counted; at least the minimum; then
    rounded up to the multiple that a backend cuts into equal parts.

    Degenerate: without any token the minimum. Raises on no rank, minimum < 0, multiple < 1.

    Decides: DROP-08. Source: arithmetic, the largest of all loads holds every load.

    >>> lossless_capacity([torch.tensor([[0, 1]]), torch.tensor([[2, 1], [1, 0], [1, 2]])], 3)
    3
    >>> lossless_capacity([torch.tensor([[2, 1], [1, 0], [1, 2]])], 3, multiple=2)
    4
    """
    if not ids_by_rank or minimum < 0 or multiple < 1:
        raise ValueError(f"{len(ids_by_rank)} ranks, minimum {minimum}, multiple {multiple}: need ranks, >= 0 and >= 1")
    largest = max(int(loads(ids_TK, experts).max()) for ids_TK in ids_by_rank)
    return ceil(Fraction(max(minimum, largest), multiple)) * multiple


def fits(ids_TK: Tensor, experts: int, capacity: int) -> Tensor:
    """Count the slots that each expert keeps, int64 (T, K) -> int64 (E,).

    Rule: min(n_e, C), whatever the policy and however the ids came about. Degenerate: C >= max n_e drops
    nothing (DROP-04), C = 0 keeps nothing. Raises on a negative capacity.

    Decides: DROP-03, FORCE-19. Source: GShard section 2.2.

    >>> fits(torch.tensor([[2, 0], [-1, 2], [2, 3]]), 5, 2).tolist()
    [1, 0, 2, 1, 0]
    """
    if capacity < 0:
        raise ValueError(f"capacity {capacity} is negative")
    return loads(ids_TK, experts).clamp(max=capacity)  # (E,)


def padded_rows(tokens: int, capacity: int) -> tuple[int, ...]:
    """List the allowed numbers of rows that each expert gets from a rank when rows are padded to capacity.

    Rule: C, the same for every expert; or min(C, T) where the added rows are tokens that did not select the
    expert, of which there are no more than T. Degenerate: T = 0 gives no rows, or C (the minimum) of
    padding. Raises on negative sizes.

    Decides: DROP-12. Source: GShard section 2.2 (fixed buffers).

    >>> padded_rows(5, 3), padded_rows(3, 5), padded_rows(0, 2)
    ((3,), (3, 5), (0, 2))
    """
    if tokens < 0 or capacity < 0:
        raise ValueError(f"{tokens} tokens, capacity {capacity}: neither may be negative")
    return tuple(sorted({capacity, min(capacity, tokens)}))


def _rounds_nothing(tokens: int, top_k: int, experts: int, factor: float) -> bool:
    """Return whether factor K T / E is exact in float32 in any order of its operations."""
    power_of_two = experts & (experts - 1) == 0
    product = Fraction(factor).numerator * top_k * tokens
    return product == 0 or (power_of_two and product < 2**24)


def _check_sizes(tokens: int, top_k: int, experts: int) -> None:
    """Raise where no token can be routed, or there are fewer than none."""
    if tokens < 0 or not 1 <= top_k <= experts:
        raise ValueError(f"{tokens} tokens choose {top_k} of {experts} experts: need T >= 0 and 1 <= K <= E")
