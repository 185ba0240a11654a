"""Draws: what random and biased forcing must look like, whatever the random numbers are.

Random forcing replaces the logits by independent normal ones; biased forcing adds to these one normal bias
of an expert, drawn anew in each forward or kept for a layer. A judge sees loads, logits where they are
visible, and, with a bias so large that it decides alone, which K experts all tokens choose.

Sources: behaviour of Megatron-Core's forced balancing and forced bias; Bernstein's inequality.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, isnan, sqrt

import torch
from torch import Tensor


def load_margin(tokens: int, top_k: int, experts: int) -> float:
    """Compute how far a load of random routing may be from its mean K T / E.

    Rule: 7 sigma + 16, sigma^2 = T (K/E)(1 - K/E). By Bernstein's inequality exceeded with probability
    below 1e-9: 2 exp(-d^2 / (2 sigma^2 + 2 d / 3)), d the margin, is largest at sigma = 0, 2 exp(-24).
    Degenerate: K = E has sigma = 0.

    Decides: FORCE-06. Source: Bernstein's inequality.

    >>> load_margin(100, 2, 4), load_margin(100, 4, 4)
    (51.0, 16.0)
    """
    if tokens < 0 or not 1 <= top_k <= experts:
        raise ValueError(f"T = {tokens}, K = {top_k} of E = {experts}: need T >= 0 and 1 <= K <= E")
    chance = top_k / experts
    return 7 * sqrt(tokens * chance * (1 - chance)) + 16


def legal_random_loads(loads_E: Tensor, top_k: int) -> Tensor:
    """Say of each expert whether its load may come of random forcing, int64 (E,) -> bool (E,).

    Rule: |n_e - K T / E| <= `load_margin`, T = sum n_e / K, in fractions: at the margin itself a rounded
    root may lie on either side. Degenerate: K = E loads every expert with T exactly; T = 0 has no load.
    Raises where K does not divide the sum, or is not in 1..E.

    Decides: FORCE-06. Source: Bernstein's inequality.

    >>> legal_random_loads(torch.tensor([101, 99, 49, 151]), 4).tolist()
    [False, False, False, False]
    >>> legal_random_loads(torch.tensor([72, 9, 9, 10]), 1).tolist()
    [False, True, True, True]
    """
    experts, choices = len(loads_E), int(loads_E.sum())
    if not 1 <= top_k <= experts or choices % top_k:
        raise ValueError(f"{choices} choices are not K = {top_k} of {experts} experts for each token")
    chance = Fraction(top_k, experts)
    variance = choices // top_k * chance * (1 - chance)
    legal = []
    for n in loads_E.tolist():
        off = abs(n - Fraction(choices, experts))
        legal.append(off == 0 if variance == 0 else off <= 16 or (off - 16) ** 2 <= 49 * variance)
    return torch.tensor(legal, dtype=torch.bool)  # (E,)


def bias_moment(logits_by_draw: Sequence[Tensor]) -> float:
    """Measure the spread of the experts' biases in forced logits, (T, E) of each draw.

    Rule: the mean over draws and experts of (mean over t of z_te)^2. Raises on no draw, on T = 0 or another
    shape in one.

    Decides: FORCE-08. Source: arithmetic, the mean over tokens leaves the bias and 1 / T of the noise.

    >>> bias_moment([torch.tensor([[1.0, -2.0, 0.0], [3.0, -2.0, 0.0]])])
    2.6666666666666665
    """
    shapes = {tuple(z_TE.shape) for z_TE in logits_by_draw}
    if len(shapes) != 1 or 0 in next(iter(shapes)):
        raise ValueError(f"draws of shapes {sorted(shapes)}: give at least one, all (T, E) with T, E > 0")
    return float(torch.stack([z_TE.double().mean(dim=0) ** 2 for z_TE in logits_by_draw]).mean())


def bias_moment_bounds(deviation: float, tokens: int, experts: int, draws: int) -> tuple[float, float]:
    """Bound `bias_moment` for a deviation v of either sign.

    Rule: (v^2 + 1/T)(1 -+ 8 sqrt(2 / n)), n = E draws: eight standard deviations of the mean of n squares
    of normal numbers. Never below 0. Degenerate: v = 0 leaves 1/T.

    Decides: FORCE-08. Source: arithmetic, a square of a normal number of variance s has variance 2 s^2.

    >>> bias_moment_bounds(-3.0, 4, 64, 8), bias_moment_bounds(3.0, 4, 2, 16)
    ((4.625, 13.875), (0.0, 27.75))
    """
    if min(tokens, experts, draws) < 1 or isnan(deviation):
        raise ValueError(f"v = {deviation}, T = {tokens}, E = {experts}, {draws} draws: need sizes >= 1")
    centre, width = deviation**2 + 1 / tokens, 8 * sqrt(2 / (experts * draws))
    return max(0.0, centre * (1 - width)), centre * (1 + width)


def one_choice(ids: Sequence[Tensor]) -> bool:
    """Return whether all tokens of all tensors, int64 (T, K), choose the same experts, in whatever order.

    Rule: of one forward at a huge deviation; of the forwards of a layer whose bias is kept; of the ranks of
    a pipeline stage. Degenerate: T = 0 says nothing, and no token at all is True.

    Decides: FORCE-08, FORCE-10, FORCE-11, FORCE-12. Source: arithmetic, the largest biases win for every token.

    >>> one_choice([torch.tensor([[2, 0], [0, 2]]), torch.tensor([[0, 2]])]), one_choice([torch.tensor([[2], [0]])])
    (True, False)
    """
    return len({frozenset(ids_K) for ids_TK in ids for ids_K in ids_TK.tolist()}) <= 1


def chance_alike(draws: int, top_k: int, experts: int) -> float:
    """Compute the chance that so many further draws of K experts all equal the first.

    Rule: binom(E, K)^-draws. A judge that demands a difference asks for enough draws: of tokens (random
    forcing, next forward), of forwards or of layers (biased).

    Decides: whether FORCE-06 and FORCE-10 can be decided. Source: arithmetic.

    >>> chance_alike(2, 2, 4), chance_alike(15, 4, 4)
    (0.027777777777777776, 1.0)
    """
    if draws < 0 or not 1 <= top_k <= experts:
        raise ValueError(f"{draws} draws of {top_k} of {experts} experts: need >= 0 and 1 <= K <= E")
    return float(comb(experts, top_k)) ** -draws
