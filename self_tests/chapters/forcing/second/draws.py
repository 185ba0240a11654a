"""Forced draws by hand: what random logits and biases may lead to, and when their likeness is no accident.

A load is a sum of T independent draws, 1 with chance K / E: mean T K / E and variance T (K / E) (1 - K / E).
A mean over T tokens of g_te + b_e has variance v^2 + 1 / T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def load_margin(tokens: int, top_k: int, experts: int) -> float:
    """Seven standard deviations and 16."""
    if tokens < 0 or not 1 <= top_k <= experts:
        raise ValueError(f"{tokens}, {top_k}, {experts}")
    chance = top_k / experts
    return 7.0 * math.sqrt(tokens * chance * (1.0 - chance)) + 16.0


def legal_random_loads(loads_E: Sequence[int], top_k: int) -> list[bool]:
    """Whether each load lies within the margin of its mean, squared and in whole numbers.

    With d = |n E - K T| and T K (E - K) = (E sigma)^2: d <= 7 E sigma + 16 E.
    """
    experts = len(loads_E)
    if not 1 <= top_k <= experts or sum(loads_E) % top_k:
        raise ValueError(f"loads {loads_E} of top {top_k}")
    tokens = sum(loads_E) // top_k
    verdicts = []
    for load in loads_E:
        distance = abs(load * experts - top_k * tokens)
        beyond = distance - 16 * experts
        if top_k == experts or tokens == 0:
            verdicts.append(distance == 0)
        else:
            verdicts.append(beyond <= 0 or beyond**2 <= 49 * tokens * top_k * (experts - top_k))
    return verdicts


def bias_moment(logits_by_draw: Sequence[Floats]) -> float:
    """Mean square, over draws and experts, of the mean over tokens of the logits."""
    squares = []
    for logits_TE in logits_by_draw:
        T, E = logits_TE.shape
        if T == 0 or logits_TE.shape != logits_by_draw[0].shape:
            raise ValueError(f"logits of shape {logits_TE.shape}")
        for expert in range(E):
            mean = math.fsum(float(logits_TE[token, expert]) for token in range(T)) / T
            squares.append(mean * mean)
    if not squares:
        raise ValueError("no draw")
    return math.fsum(squares) / len(squares)


def bias_moment_bounds(deviation: float, tokens: int, experts: int, draws: int) -> tuple[float, float]:
    """Eight standard deviations of a mean of n squares about v^2 + 1 / T; a square is never below 0."""
    if tokens < 1 or experts < 1 or draws < 1 or not math.isfinite(deviation):
        raise ValueError(f"{deviation}, {tokens}, {experts}, {draws}")
    variance = deviation**2 + 1.0 / tokens
    spread = 8.0 * variance * math.sqrt(2.0 / (experts * draws))
    return max(0.0, variance - spread), variance + spread


def sets_of(ids: Sequence[Ints]) -> set[frozenset[int]]:
    """The different sets of experts that any token chose."""
    return {frozenset(row) for ids_TK in ids for row in ids_TK.tolist()}


def one_choice(ids: Sequence[Ints]) -> bool:
    """Whether no two tokens chose different experts."""
    return len(sets_of(ids)) <= 1


def chance_alike(draws: int, top_k: int, experts: int) -> float:
    """Chance that so many further draws all hit the first one's set, among all sets of K experts."""
    if draws < 0 or not 1 <= top_k <= experts:
        raise ValueError(f"{draws}, {top_k}, {experts}")
    sets = sum(1 for _ in combinations(range(experts), top_k))
    chance = Fraction(1)
    for _ in range(draws):
        chance /= sets
    return float(chance)
