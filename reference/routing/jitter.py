"""Jitter: noise that multiplies what the gate reads, and nothing else.

A judge that knows x and the gate's weights sees the factors themselves: with rows of W that are 1 in one
column, each logit is one product of a token's element with its factor.

Source: Switch Transformer (Fedus et al. 2021) section 2.2 (input jitter).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from torch import Tensor


class Deviations(NamedTuple):
    """How far factors lie from independent uniform ones, in standard deviations."""

    mean: float
    variance: float
    along_tokens: float
    along_columns: float


def jittered_logits(x_TD: Tensor, factors_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Compute the logits of a router with jitter, (T, D), (T, D), (E, D) -> (T, E), differentiable.

    Rule: l = (x * j) W^T, so that dL/dx = j * (dL/dl W). The experts get x itself.

    Degenerate: factors of 1 change nothing. T = 0 gives (0, E).

    Raises:
        ValueError: factors of another shape than x, a weight of another D.

    Decides: ROUTE-18. Source: Switch Transformer section 2.2.

    >>> import torch
    >>> x, j = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True), torch.tensor([[1.5, 1.0, 0.5]])
    >>> l = jittered_logits(x, j, torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 10.0]]))
    >>> l.tolist(), torch.autograd.grad(l.sum(), x)[0].tolist()
    ([[1.5, 22.0]], [[1.5, 1.0, 5.0]])
    """
    if factors_TD.shape != x_TD.shape or weight_ED.shape[1:] != x_TD.shape[1:]:
        shapes = [tuple(each.shape) for each in (x_TD, factors_TD, weight_ED)]
        raise ValueError(f"shapes {shapes} are not (T, D), (T, D) and (E, D)")
    return (x_TD.double() * factors_TD.double()) @ weight_ED.double().T  # (T, E)


def seen_factors(logits_TE: Tensor, x_TD: Tensor, columns_E: Sequence[int]) -> Tensor:
    """Read the factors out of the logits of a gate whose row e is 1 in column `columns_E[e]`, -> (T, E).

    Rule: j_te = l_te / x_t,columns[e]; every other factor stays unseen.

    Raises:
        ValueError: shapes that do not fit, a column out of range or twice, a token that is 0 or not finite
            where it is read.

    Decides: ROUTE-18. Source: arithmetic.

    >>> import torch
    >>> seen_factors(torch.tensor([[6.0, 1.5]]), torch.tensor([[1.0, 9.0, 5.0]]), [2, 0]).tolist()
    [[1.2, 1.5]]
    """
    columns, D = list(columns_E), x_TD.shape[1]
    if len(set(columns)) < len(columns) or not set(columns) <= set(range(D)):
        raise ValueError(f"columns {columns} are not different ones of {D}")
    if tuple(logits_TE.shape) != (len(x_TD), len(columns)):
        raise ValueError(f"logits {tuple(logits_TE.shape)} of {len(x_TD)} tokens and {len(columns)} experts")
    read_TE = x_TD.double()[:, columns]  # (T, E)
    if bool((~read_TE.isfinite() | (read_TE == 0)).any()):
        raise ValueError("a token is 0 or not finite where the gate reads it: no factor can be seen there")
    return logits_TE.double() / read_TE  # (T, E)


def legal_factors(factors: Tensor, eps: float, *, unit: float) -> Tensor:
    """Say of every factor whether it is in bounds, bool of the same shape.

    Args:
        factors: of any shape, as seen in the logits.
        eps: the size of the jitter.
        unit: unit roundoff of the type in which x * j is computed, e.g. 2^-24.

    Rule: 1 - eps - s <= j <= 1 + eps + s with s = 4 unit (1 + eps): the bounds, the factor, its product with x
    and the quotient that shows it are rounded.

    Degenerate: eps = 0 is no jitter, j = 1 exactly. A NaN is out of bounds.

    Raises:
        ValueError: eps outside 0..1, a negative unit.

    Decides: ROUTE-18. Source: Switch Transformer section 2.2; arithmetic.

    >>> import torch
    >>> legal_factors(torch.tensor([0.75, 1.25, 1.26, 0.0]), 0.25, unit=2**-24).tolist()
    [True, True, False, False]
    """
    if not 0 <= eps <= 1 or not unit >= 0:
        raise ValueError(f"eps {eps}, unit {unit}: need eps in 0..1 and unit >= 0")
    j = factors.double()
    slack = 4 * unit * (1 + eps) if eps > 0 else 0.0
    return (j >= 1 - eps - slack) & (j <= 1 + eps + slack)


def deviations(factors_TN: Tensor, eps: float) -> Deviations:
    """Measure factors (T, N) against independent uniform ones, in standard deviations: beyond 8 they are not.

    Rule: u = (j - 1) / eps is uniform on [-1, 1]: mean 0 and variance 1/3 of u, mean 1/3 and variance 4/45 of
    u^2, and the product of two neighbours, of mean 0 and variance 1/9, along tokens and along columns.
    Each mean, less what it should be, over its own standard deviation.

    Degenerate: no neighbours, no deviation: 0. It takes some hundred factors to tell; then one for all of a token
    shows along columns, and no jitter as a variance that is too small.

    Raises:
        ValueError: eps <= 0, no factor, one that is not finite.

    Decides: ROUTE-18. Source: arithmetic, moments of a uniform variable.

    >>> import torch
    >>> [round(z, 3) for z in deviations(torch.tensor([[1.5], [1.5], [1.5]]), 0.5)]
    [3.0, 3.873, 4.243, 0.0]
    """
    if not eps > 0 or factors_TN.numel() == 0 or not bool(factors_TN.isfinite().all()):
        raise ValueError(f"eps {eps}, factors {tuple(factors_TN.shape)}: need eps > 0 and finite factors")
    u_TN = (factors_TN.double() - 1) / eps  # (T, N)
    return Deviations(
        mean=_in_deviations(u_TN, sqrt(1 / 3)),
        variance=_in_deviations(u_TN**2 - 1 / 3, sqrt(4 / 45)),
        along_tokens=_in_deviations(u_TN[1:] * u_TN[:-1], 1 / 3),
        along_columns=_in_deviations(u_TN[:, 1:] * u_TN[:, :-1], 1 / 3),
    )


def _in_deviations(values: Tensor, deviation: float) -> float:
    """Divide the mean of values that should have mean 0 by its standard deviation, given that of one."""
    n = values.numel()
    return values.mean().item() * sqrt(n) / deviation if n else 0.0
