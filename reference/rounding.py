"""Rounding: how large the error of the layer's results may be in correct code, element by element.

Every number carries two bounds of its error, to first order in u. `worst` adds up all roundings as if each were as
large as it may be and all had the same sign. `spread` is their standard deviation: a rounding to nearest errs evenly
between -u |a| and u |a|, so by u |a| / sqrt(3), and independent roundings add up by their squares. An error beyond 7
spreads has a probability under 2 exp(-24.5), 10^-10. The smaller of worst and 7 spreads is what is allowed. Inputs are
exact. The rules:

* what is stored is rounded once by u, the unit roundoff of its dtype;
* a function f of z inherits |f'(z)| times the error of z, may err by 4 v |f| for the steps it takes in an accumulator
  of unit roundoff v (sigmoid: an exponential, good to the last place; a sum; a quotient), and is stored;
* a sum of n products inherits err(a) |b| + |a| err(b) from each; each product may be stored; each of n additions
  errs by v times the sum of absolute addends; and the sum is stored.

The worst case of a sum of more than 49 / 3 products says nothing new (Cauchy and Schwarz), and 7 spreads are taken in
its place. Where errors may be alike, as those of ties are, both are added up as in the worst case.

Source: Higham, "Accuracy and Stability of Numerical Algorithms", 3.1 and 3.3 (inner products, running error
analysis); Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41 (2019),
whose bound is Hoeffding's. Sums of evenly spread errors are sub-Gaussian with their own variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEVIATIONS = 7  # how many spreads an error may be away


@dataclass(frozen=True)
class Measured:
    """A float64 value and the two bounds of its error, all of the same shape."""

    value: Tensor
    worst: Tensor
    spread: Tensor

    @property
    def error(self) -> Tensor:
        """What a correct result may be off by; the squares of a tiny spread may be too small for float64, and 0."""
        return torch.where(self.spread > 0, torch.minimum(self.worst, DEVIATIONS * self.spread), self.worst)

    def __neg__(self) -> Measured:
        """Change the sign, exactly."""
        return Measured(-self.value, self.worst, self.spread)


def exact(value: Tensor) -> Measured:
    """Take an input as it is given."""
    zero = torch.zeros_like(value, dtype=torch.float64)
    return Measured(value.double(), zero, zero)


@dataclass(frozen=True)
class Rounding:
    """Arithmetic that stores results with unit roundoff u and adds up with unit roundoff v."""

    u: float
    v: float

    def stored(self, a: Measured, of: Tensor | None = None, times: int = 1) -> Measured:
        """Round once more, or several times: the value, or something on the way that is at most `of`.

        >>> Rounding(0.5, 0.25).stored(exact(torch.tensor([-6.0, 0.0])), times=2).worst.tolist()
        [6.0, 0.0]
        """
        return _rounded(a, self.u * (a.value.abs() if of is None else of), times)

    def added(self, a: Measured, of: Tensor, n: int) -> Measured:
        """Add n addends in the accumulator: partial sums are at most `of`."""
        return _rounded(a, self.v * of, n)

    def products(self, formula: str, a: Measured, b: Measured) -> Measured:
        """Sum products: any `torch.einsum` of two.

        >>> a, b = exact(torch.tensor([3.0, -2.0])), exact(torch.tensor([1.0, 4.0]))
        >>> of = Rounding(0.5, 0.25).products("i,i->", a, b)  # 0.5 |-5| + 0.5 (3 + 8) + 2 0.25 (3 + 8)
        >>> of.value.item(), of.worst.item()
        (-5.0, 13.5)
        >>> ones = exact(torch.ones(192))
        >>> Rounding(0.5, 0.0).products("i,i->", ones, ones).spread.item()  # 0.5 sqrt((192^2 + 192 1) / 3)
        55.569775957799216
        """
        n = addends(formula, a.value, b.value)
        value, of_a, of_b = torch.einsum(formula, a.value, b.value), a.value.abs(), b.value.abs()
        squares_a, squares_b = of_a.square(), of_b.square()
        variance = _inherit(formula, squares_a, a.spread.square(), squares_b, b.spread.square())
        if n == 1:
            worst = _inherit(formula, of_a, a.worst, of_b, b.worst)
            return self.stored(Measured(value, worst, variance.sqrt()))
        all_of = torch.einsum(formula, of_a, of_b)
        spread = (variance + self.u**2 / 3 * torch.einsum(formula, squares_a, squares_b)).sqrt()
        if 3 * n > DEVIATIONS**2:
            worst = DEVIATIONS * spread
        else:
            worst = _inherit(formula, of_a, a.worst, of_b, b.worst) + self.u * all_of
        return self.stored(self.added(Measured(value, worst, spread), all_of, n))

    def total(self, a: Measured, dim: int) -> Measured:
        """Sum along a dimension; errors may be alike, and partial sums may be stored as exactly as the whole."""
        sums = Measured(a.value.sum(dim), a.worst.sum(dim), a.spread.sum(dim))
        all_of, n = a.value.abs().sum(dim), a.value.shape[dim]
        return self.stored(self.added(sums, all_of, n), of=all_of)

    def plus(self, a: Measured, b: Measured) -> Measured:
        """Add two."""
        spread = (a.spread.square() + b.spread.square()).sqrt()
        return self.stored(Measured(a.value + b.value, a.worst + b.worst, spread))

    def function(self, value: Tensor, slope: Tensor, z: Measured, own: Tensor | None = None) -> Measured:
        """Apply a function, given value and slope at z; and what its own roundings are relative to, if not |f|."""
        inherited = Measured(value, slope.abs() * z.worst, slope.abs() * z.spread)
        return _rounded(inherited, (self.u + 4 * self.v) * (value.abs() if own is None else own), 1)

    def silu(self, z: Measured) -> Measured:
        """Apply silu, z s with s = sigmoid(z), which may have been stored."""
        s = z.value.sigmoid()
        value = z.value * s
        return self.stored(self.function(value, s + value * (1 - s), z))

    def silu_slope(self, z: Measured) -> Measured:
        """Apply the slope of silu, s + z s (1 - s), whose own slope is s (1 - s) (2 + z (1 - 2 s)).

        It is a sum of two addends, which cancel near z = -1.28, and its factors s and 1 - s may be those of a stored s.
        """
        s, z_abs = z.value.sigmoid(), z.value.abs()
        second = s * (1 - s)
        own = 2 * (s + z_abs * second) + z_abs * s
        return self.function(s + z.value * second, second * (2 + z.value * (1 - 2 * s)), z, own)


def addends(formula: str, a: Tensor, b: Tensor) -> int:
    """Count the products that an einsum adds up for each of its results.

    >>> addends("rd,fd->rf", torch.zeros(2, 5), torch.zeros(3, 5)), addends("r,rd->rd", torch.ones(2), torch.ones(2, 3))
    (5, 1)
    """
    given, result = formula.split("->")
    of_a, of_b = given.split(",")
    sizes = dict(zip(of_a, a.shape, strict=True)) | dict(zip(of_b, b.shape, strict=True))
    return math.prod(size for letter, size in sizes.items() if letter not in result)


def parts_of(formula: str, a: Measured, b: Measured, letter: str, sizes: Sequence[int]) -> Tensor:
    """Split a sum of products along a summed letter and add up the absolute parts.

    >>> a, b = exact(torch.tensor([3.0, -2.0, 5.0])), exact(torch.ones(3))
    >>> [parts_of("i,i->", a, b, "i", sizes).item() for sizes in ([3], [2, 1], [1, 1, 1])]
    [6.0, 6.0, 10.0]
    """
    of_a, of_b = formula.split("->")[0].split(",")
    split_a = a.value.split(list(sizes), of_a.index(letter))
    split_b = b.value.split(list(sizes), of_b.index(letter))
    parts = [torch.einsum(formula, *pair).abs() for pair in zip(split_a, split_b, strict=True)]
    return torch.stack(parts).sum(0)


def partial(value: Tensor, parts: Tensor) -> Tensor:
    """Bound every partial sum, in any order, of parts whose sum and whose sum of absolutes are given.

    Rule: of all partial sums that of the positive parts is the largest, that of the negative the smallest.

    >>> partial(torch.tensor(2.0), torch.tensor(8.0)).item()  # 5 - 3
    5.0
    """
    return (parts + value.abs()) / 2


def _rounded(a: Measured, off: Tensor, times: int) -> Measured:
    """Add roundings that are off by so much at most."""
    return Measured(a.value, a.worst + times * off, (a.spread.square() + times * off.square() / 3).sqrt())


def _inherit(formula: str, of_a: Tensor, error_a: Tensor, of_b: Tensor, error_b: Tensor) -> Tensor:
    return torch.einsum(formula, error_a, of_b) + torch.einsum(formula, of_a, error_b)
