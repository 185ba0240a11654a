"""Capacity by hand: how many choices an expert has, how many of them fit, and how many rows it is then handed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def loads(ids_TK: Ints, experts: int) -> list[int]:
    """How many slots chose each expert."""
    if experts < 1:
        raise ValueError("no experts")
    n_E = [0] * experts
    for row in ids_TK:
        for expert in row:
            if not -1 <= expert < experts:
                raise ValueError(f"id {expert}")
            if expert >= 0:
                n_E[expert] += 1
    return n_E


def capacities(
    tokens: int, top_k: int, experts: int, *, factor: float, minimum: int = 0, rounding: str = "up"
) -> list[int]:
    """Every legal capacity, in whole numbers: factor is top / 2^p, and the capacity top K T over 2^p E.

    Within 4 roundings of 2^-24 of a whole number, that one and the next are legal. Nothing is rounded, so only the
    next whole number is, where there is no choice at all, or where all factors and products fit float32: a
    division by 2^p or by E is then one of the exponent alone. Rounded down it is that one and the one before.
    """
    if tokens < 0 or not 1 <= top_k <= experts or not 0.0 <= factor < math.inf or minimum < 0:
        raise ValueError(f"no capacity for {tokens}, {top_k}, {experts}, {factor}, {minimum}")
    top, two_to_p = factor.as_integer_ratio()
    product, divisor = top * top_k * tokens, two_to_p * experts
    below = product // divisor
    up = rounding == "up"
    exact = below if below * divisor == product or not up else below + 1
    found = {exact}
    power_of_two = experts & (experts - 1) == 0
    if not (product == 0 or (power_of_two and product < 2**24)):
        for whole in (below, below + 1):
            if abs(product - whole * divisor) * 2**24 <= 4 * product:
                found |= {whole, whole + (1 if up else -1)}
    return sorted({max(minimum, capacity) for capacity in found})


def lossless_capacity(ids_by_rank: Sequence[Ints], experts: int, *, minimum: int = 0, multiple: int = 1) -> int:
    """The smallest multiple that is no less than the minimum and than any rank's load of any expert."""
    if not ids_by_rank or minimum < 0 or multiple < 1:
        raise ValueError(f"{len(ids_by_rank)} ranks, minimum {minimum}, multiple {multiple}")
    capacity = 0
    for ids_TK in ids_by_rank:
        for load in loads(ids_TK, experts):
            while capacity < load or capacity < minimum:
                capacity += multiple
    while capacity < minimum:
        capacity += multiple
    return capacity


def fits(ids_TK: Ints, experts: int, capacity: int) -> list[int]:
    """How many slots each expert keeps: as many as chose it, and no more than its places."""
    if capacity < 0:
        raise ValueError(f"capacity {capacity}")
    return [load if load < capacity else capacity for load in loads(ids_TK, experts)]


def padded_rows(tokens: int, capacity: int) -> list[int]:
    """Rows of every expert after padding: a place for each of C, or, filled with unchosen tokens, for each of T."""
    if tokens < 0 or capacity < 0:
        raise ValueError(f"{tokens} tokens, capacity {capacity}")
    return [capacity] if capacity <= tokens else [tokens, capacity]
