"""Rounding: how large an honest error of the layer's results may be, element by element.

Every number carries a magnitude: if each operation errs by at most u times the sum of its own absolute
addends, then a result errs by at most u times its magnitude, to first order in u. Inputs are exact, with
magnitude 0. Three rules give all others:

* a sum of products adds up |a| |b| (its own error) and what it inherits, M(a) |b| + |a| M(b);
* a plain sum adds up |a| + M(a);
* a function f of z has its own error plus |f'(z)| M(z).

A judge multiplies a magnitude by the u of the dtype and of the longest sum: for n addends in an accumulator
of unit roundoff v, n v, plus the unit roundoff of what is stored. `magnitudes.py` applies the rules to the
layer.

Source: Higham, "Accuracy and Stability of Numerical Algorithms", sections 3.1 (inner products) and 3.3
(running error analysis).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """A float64 value and its magnitude, of the same shape."""

    value: Tensor
    magnitude: Tensor


def exact(value: Tensor) -> Measured:
    """Take an input as it is given."""
    return Measured(value.double(), torch.zeros_like(value, dtype=torch.float64))


def products(formula: str, a: Measured, b: Measured) -> Measured:
    """Sum products: any `torch.einsum` of two.

    >>> a, b = exact(torch.tensor([3.0, -2.0])), exact(torch.tensor([1.0, 4.0]))
    >>> products("i,i->", a, b)
    Measured(value=tensor(-5., dtype=torch.float64), magnitude=tensor(11., dtype=torch.float64))
    """
    own = torch.einsum(formula, a.value.abs(), b.value.abs())
    from_a = torch.einsum(formula, a.magnitude, b.value.abs())
    from_b = torch.einsum(formula, a.value.abs(), b.magnitude)
    return Measured(torch.einsum(formula, a.value, b.value), own + from_a + from_b)


def total(a: Measured, dim: int) -> Measured:
    """Sum along a dimension."""
    return Measured(a.value.sum(dim), (a.value.abs() + a.magnitude).sum(dim))


def plus(a: Measured, b: Measured) -> Measured:
    """Add two."""
    return total(Measured(torch.stack([a.value, b.value]), torch.stack([a.magnitude, b.magnitude])), 0)


def silu(z: Measured) -> Measured:
    """Apply silu, z s with s = sigmoid(z)."""
    s = z.value.sigmoid()
    value = z.value * s
    slope = s + z.value * s * (1 - s)
    return Measured(value, value.abs() + slope.abs() * z.magnitude)


def silu_slope(z: Measured) -> Measured:
    """Apply the slope of silu, s + z s (1 - s), whose own slope is s (1 - s) (2 + z (1 - 2 s)).

    It is a sum of two addends, which cancel near z = -1.28.
    """
    s = z.value.sigmoid()
    value = s + z.value * s * (1 - s)
    own = s + z.value.abs() * s * (1 - s)
    slope = s * (1 - s) * (2 + z.value * (1 - 2 * s))
    return Measured(value, own + slope.abs() * z.magnitude)
