"""Error bounds: how far a correct implementation may differ from the oracle, derived for every element.

The magnitudes of `reference.rounding` add up rounding errors of the first order. This module defines
the unit roundoffs with which an implementation stores and adds up, and adds the products of errors and the errors of
subnormal numbers.

Source: Higham, "Accuracy and Stability of Numerical Algorithms", sections 2.2 (rounding) and 3.4 (gamma).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.reference.rounding.errors import Rounding

# Operations on the longest path from an input to a result: an error passes through fewer than this many others. Their
# products are the second order, which `gamma` covers.
_DEPTH = 16


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype: the largest relative error of one rounding to nearest.

    >>> unit_roundoff(torch.bfloat16) == 2**-8, unit_roundoff(torch.float32) == 2**-24
    (True, True)
    """
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype in which a correct matrix product accumulates: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rounding(dtype: torch.dtype) -> Rounding:
    """Return the unit roundoffs of a correct implementation on tokens of the given dtype.

    >>> rounding(torch.bfloat16) == Rounding(2**-8, 2**-24)
    True
    """
    return Rounding(unit_roundoff(dtype), unit_roundoff(accumulator(dtype)))


def gamma(n: float, u: float) -> float:
    """Return the bound n u / (1 - n u) on the relative error of n roundings with unit roundoff u.

    >>> gamma(1, 0.5), gamma(0, 0.5)
    (1.0, 0.0)

    Raises:
        ValueError: n u >= 1, so that nothing is known about the result.
    """
    if n * u >= 1:
        raise ValueError(f"{n} roundings of {u} leave no significant digit; use a wider dtype or shorter sums")
    return n * u / (1 - n * u)


def allowed(error: Tensor, dtype: torch.dtype, *, addends: int) -> Tensor:
    """Return the allowed error of every element, given its first-order error and the number of addends of all its sums.

    Below the smallest normal number errors are no longer relative: each addend may err by the roundoff of that number.
    What the accumulator lost there (all of it, if it flushes subnormals to zero) may have been multiplied afterwards,
    for example by a large token. Factors up to 1/u are covered. An element whose addends are all zero has the allowed
    error 0.
    """
    u, wide = unit_roundoff(dtype), accumulator(dtype)
    lost = torch.finfo(wide).tiny / unit_roundoff(wide)
    underflow = addends * (u * torch.finfo(dtype).tiny + lost)
    return torch.where(error > 0, error * gamma(_DEPTH, u) / (_DEPTH * u) + underflow, 0.0)


def sums_of_a_gradient(microbatches: int, replicas: int) -> int:
    """Return how many roundings the gradient of a parameter may have in addition to those of one sum over all tokens.

    Every rank's part of every microbatch is stored. Microbatches are added up, and replicas: one rounding for each but
    the first. A mean over data parallel ranks divides, and may be cast.
    """
    return 1 + (microbatches - 1) + (replicas - 1) + 2


def longest_sum(config: Config) -> int:
    """Return the number of addends of the longest sum within a token: the largest of D, F and E.

    >>> longest_sum(Config(hidden=32, ffn=16))
    32
    """
    return max(config.hidden, config.ffn, config.experts)
