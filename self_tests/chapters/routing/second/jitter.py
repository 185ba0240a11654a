"""Jitter of what a gate reads, by hand, and what its factors must look like.

    l_te = sum_d x_td j_td W_ed      dx_td = j_td sum_e g_te W_ed,  dj_td = x_td sum_e g_te W_ed,
                                     dW_ed = sum_t g_te x_td j_td

For u uniform on [-1, 1]: E u = 0, E u^2 = 1/3, E u^4 = 1/5. So u has variance 1/3, u^2 has 1/5 - 1/9 = 4/45, and
the product of two independent ones has 1/9. A mean of n of them, divided by sqrt(variance / n), is a z-score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Deviations(NamedTuple):
    """How far factors are from uniform and independent ones, as z-scores."""

    mean: float
    variance: float
    along_tokens: float
    along_columns: float


def jittered_logits(x_TD: Floats, factors_TD: Floats, weight_ED: Floats) -> Floats:
    """Logits (T, E) of the jittered input."""
    (T, D), (E, D2) = x_TD.shape, weight_ED.shape
    if factors_TD.shape != (T, D) or D != D2:
        raise ValueError(f"x {x_TD.shape}, factors {factors_TD.shape}, weight {weight_ED.shape}")
    logits_TE = np.zeros((T, E), dtype=np.float64)
    for t in range(T):
        for e in range(E):
            for d in range(D):
                logits_TE[t, e] += x_TD[t, d] * factors_TD[t, d] * weight_ED[e, d]
    return logits_TE


def jittered_logits_backward(
    x_TD: Floats, factors_TD: Floats, weight_ED: Floats, g_TE: Floats
) -> tuple[Floats, Floats, Floats]:
    """Gradients of x, of the factors and of the weight."""
    dx_TD, dfactors_TD, dweight_ED = np.zeros(x_TD.shape), np.zeros(x_TD.shape), np.zeros(weight_ED.shape)
    for t in range(g_TE.shape[0]):
        for e in range(g_TE.shape[1]):
            for d in range(x_TD.shape[1]):
                dx_TD[t, d] += factors_TD[t, d] * g_TE[t, e] * weight_ED[e, d]
                dfactors_TD[t, d] += x_TD[t, d] * g_TE[t, e] * weight_ED[e, d]
                dweight_ED[e, d] += g_TE[t, e] * x_TD[t, d] * factors_TD[t, d]
    return dx_TD, dfactors_TD, dweight_ED


def seen_factors(logits_TE: Floats, x_TD: Floats, columns_E: Sequence[int]) -> Floats:
    """What multiplied the one column that each expert's row of ones and zeros reads."""
    (T, E), (T2, D) = logits_TE.shape, x_TD.shape
    if T != T2 or E != len(columns_E) or any(not 0 <= column < D for column in columns_E):
        raise ValueError(f"logits {logits_TE.shape}, x {x_TD.shape}, columns {columns_E}")
    factors_TE = np.zeros((T, E), dtype=np.float64)
    for e, column in enumerate(columns_E):
        if column in columns_E[:e]:
            raise ValueError(f"column {column} twice")
        for t in range(T):
            read = float(x_TD[t, column])
            if read == 0.0 or not math.isfinite(read):
                raise ValueError(f"x[{t}, {column}] = {read} tells no factor")
            factors_TE[t, e] = float(logits_TE[t, e]) / read
    return factors_TE


def legal_factors(factors: Floats, eps: float, *, unit: float) -> Bools:
    """Whether each factor lies within 1 - eps and 1 + eps, four roundings apart at most."""
    if not 0.0 <= eps <= 1.0 or not unit >= 0.0:
        raise ValueError(f"eps {eps}, unit {unit}")
    widest = Fraction(eps) + 4 * Fraction(unit) * (1 + Fraction(eps))
    legal = np.zeros(factors.shape, dtype=np.bool_)
    for at in np.ndindex(*factors.shape):
        factor = float(factors[at])
        if math.isfinite(factor):
            legal[at] = factor == 1.0 if eps == 0.0 else abs(Fraction(factor) - 1) <= widest
    return legal


def z_score(addends: Sequence[float], variance: float) -> float:
    """How many standard deviations the mean of these is from 0; 0 if there are none."""
    return math.fsum(addends) / math.sqrt(variance * len(addends)) if addends else 0.0


def deviations(factors_TN: Floats, eps: float) -> Deviations:
    """The z-scores of the mean, of the mean square, and of the products of neighbours in both directions."""
    if not eps > 0.0 or factors_TN.size == 0 or not np.isfinite(factors_TN).all():
        raise ValueError(f"{factors_TN.shape} factors, eps {eps}")
    T, N = factors_TN.shape
    u = [[(float(factors_TN[t, n]) - 1.0) / eps for n in range(N)] for t in range(T)]
    everything = [u[t][n] for t in range(T) for n in range(N)]
    below = [u[t][n] * u[t + 1][n] for t in range(T - 1) for n in range(N)]
    beside = [u[t][n] * u[t][n + 1] for t in range(T) for n in range(N - 1)]
    return Deviations(
        z_score(everything, 1 / 3),
        z_score([value * value - 1 / 3 for value in everything], 4 / 45),
        z_score(below, 1 / 9),
        z_score(beside, 1 / 9),
    )
