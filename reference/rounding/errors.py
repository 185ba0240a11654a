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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from functools import partial as bind
from typing import TypeVar

import torch
from torch import Tensor

DEVIATIONS = 7  # how many spreads an error may be away

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Measured:
    """A float64 value and the two bounds of its error, all of the same shape."""

    value: Tensor
    worst: Tensor
    spread: Tensor
    exact: bool = field(default=False, kw_only=True)  # both bounds are zeros, so that products need not inherit them

    @property
    def error(self) -> Tensor:
        """What a correct result may be off by; the squares of a tiny spread may be too small for float64, and 0."""
        return torch.where(self.spread > 0, torch.minimum(self.worst, DEVIATIONS * self.spread), self.worst)

    def __neg__(self) -> Measured:
        """Change the sign, exactly."""
        return Measured(-self.value, self.worst, self.spread, exact=self.exact)

    def map(self, change: Callable[[Tensor], Tensor]) -> Measured:
        """Arrange the elements in another way: view, take or expand them."""
        return Measured(change(self.value), change(self.worst), change(self.spread), exact=self.exact)


def errors(found: Mapping[K, Measured]) -> dict[K, Tensor]:
    """Return the error of each, those of one shape at once.

    >>> a, b = (Measured(*torch.tensor([[1.0], [2.0], [spread]])) for spread in (0.0, 0.25))
    >>> errors({"a": a, "b": b})
    {'a': tensor([2.]), 'b': tensor([1.7500])}
    """
    of_shape: dict[tuple[int, ...], list[K]] = {}
    for key, each in found.items():
        of_shape.setdefault(tuple(each.value.shape), []).append(key)
    told = dict[K, Tensor]()
    for keys in of_shape.values():
        alike = [found[key] for key in keys]
        value, worst, spread = ([getattr(each, name) for each in alike] for name in ("value", "worst", "spread"))
        together = Measured(torch.stack(value), torch.stack(worst), torch.stack(spread))
        told |= dict(zip(keys, together.error, strict=True))
    return {key: told[key] for key in found}


def exact(value: Tensor) -> Measured:
    """Take an input as it is given."""
    zero = torch.zeros_like(value, dtype=torch.float64)
    return Measured(value.double(), zero, zero, exact=True)


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

    def added(self, a: Measured, of: Tensor, n: int | Tensor) -> Measured:
        """Add n addends in the accumulator: partial sums are at most `of`."""
        return _rounded(a, self.v * of, n)

    def products(self, formula: str, a: Measured, b: Measured, n: Tensor | None = None) -> Measured:
        """Sum products: any `torch.einsum` of two. Where some of the products are padding, `n` counts the others.

        Padding is zeros, and adds nothing; but how often a sum is rounded depends on the count of its addends, which
        `n` gives for every result (it is broadcast).

        >>> a, b = exact(torch.tensor([3.0, -2.0])), exact(torch.tensor([1.0, 4.0]))
        >>> of = Rounding(0.5, 0.25).products("i,i->", a, b)  # 0.5 |-5| + 0.5 (3 + 8) + 2 0.25 (3 + 8)
        >>> of.value.item(), of.worst.item()
        (-5.0, 13.5)
        >>> ones = exact(torch.ones(192))
        >>> Rounding(0.5, 0.0).products("i,i->", ones, ones).spread.item()  # 0.5 sqrt((192^2 + 192 1) / 3)
        55.569775957799216
        >>> a, b, n = exact(torch.tensor([[3.0, 0.0], [3.0, -2.0]])), exact(torch.ones(2, 2)), torch.tensor([1, 2])
        >>> Rounding(0.5, 0.25).products("ni,ni->n", a, b, n).worst.tolist()  # 0.5 3; 0.5 1 + 0.5 5 + 2 0.25 5
        [1.5, 5.5]
        """
        multiply, of_a, of_b = multiplication(formula), a.value.abs(), b.value.abs()
        value, squares_a, squares_b = multiply(a.value, b.value), of_a.square(), of_b.square()

        def inherit(of_a: Tensor, error_a: Tensor | None, of_b: Tensor, error_b: Tensor | None) -> Tensor:
            """Add up err(a) |b| + |a| err(b)."""
            from_a = torch.zeros_like(value) if error_a is None else multiply(error_a, of_b)
            return from_a if error_b is None else from_a + multiply(of_a, error_b)

        def worst_inherited() -> Tensor:
            return inherit(of_a, None if a.exact else a.worst, of_b, None if b.exact else b.worst)

        variance_a, variance_b = (None if each.exact else each.spread.square() for each in (a, b))
        variance = inherit(squares_a, variance_a, squares_b, variance_b)
        count = addends(formula, a.value, b.value)
        if count == 1:
            return self.stored(Measured(value, worst_inherited(), variance.sqrt()))
        all_of, all_squares = multiply(of_a, of_b), multiply(squares_a, squares_b)
        if n is None:
            spread = (variance + self.u**2 / 3 * all_squares).sqrt()
            many = 3 * count > DEVIATIONS**2
            worst = DEVIATIONS * spread if many else worst_inherited() + self.u * all_of
            return self.stored(self.added(Measured(value, worst, spread), all_of, count))
        several = n > 1  # a single product is added to nothing
        spread = (variance + torch.where(several, self.u**2 / 3 * all_squares, 0.0)).sqrt()
        worst = worst_inherited() + torch.where(several, self.u * all_of, 0.0)
        worst = torch.where(3 * n > DEVIATIONS**2, DEVIATIONS * spread, worst)
        return self.stored(self.added(Measured(value, worst, spread), all_of, torch.where(several, n, 0)))

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


@cache
def multiplication(formula: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what `torch.einsum` computes of two, as one product or one matmul: einsum itself takes longer than these.

    >>> a, b = torch.arange(24.0).reshape(2, 3, 4), torch.arange(40.0).reshape(2, 5, 4)
    >>> for formula, pair in (
    ...     ("nrd,nfd->nrf", (a, b)), ("nrd,nfd->fnr", (a, b)), ("nrd,nrf->nfd", (a, a)), ("nrd,nrd->nr", (a, a)),
    ...     ("nr,nrd->nrd", (a[..., 0], a)), ("r,rd->d", (a[0, :, 0], a[0])), ("r,d->dr", (a[0, :, 0], b[0, 0])),
    ... ):  # fmt: skip
    ...     assert torch.equal(multiplication(formula)(*pair), torch.einsum(formula, *pair))
    """
    given, result = formula.split("->")
    of_a, of_b = given.split(",")
    summed = "".join(dict.fromkeys(letter for letter in of_a + of_b if letter not in result))
    only_a, only_b = (
        "".join(letter for letter in mine if letter not in other) for mine, other in ((of_a, of_b), (of_b, of_a))
    )
    if not (only_a and only_b and summed):  # element by element, and then a sum
        ways = _arranged(of_a, result + summed), _arranged(of_b, result + summed)
        dims = list(range(len(result), len(result + summed)))
        if not dims:
            return lambda a, b: ways[0](a) * ways[1](b)
        return lambda a, b: (ways[0](a) * ways[1](b)).sum(dims)
    if len(only_a) == len(only_b) == len(summed) == 1:
        both = "".join(letter for letter in result if letter in of_a and letter in of_b)
        left, right = _arranged(of_a, both + only_a + summed), _arranged(of_b, both + summed + only_b)
        back = _arranged(both + only_a + only_b, result)
        return lambda a, b: back(left(a) @ right(b))
    return bind(torch.einsum, formula)


def _arranged(letters: str, order: str) -> Callable[[Tensor], Tensor]:
    """Return what puts axes into an order, with an axis of size 1 for every letter that is not there."""
    dims = [letters.index(letter) for letter in order if letter in letters]
    index = tuple(slice(None) if letter in letters else None for letter in order)
    return (lambda a: a) if letters == order else (lambda a: a.permute(dims)[index])


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
    parts = [multiplication(formula)(*pair).abs() for pair in zip(split_a, split_b, strict=True)]
    return torch.stack(parts).sum(0)


def partial(value: Tensor, parts: Tensor) -> Tensor:
    """Bound every partial sum, in any order, of parts whose sum and whose sum of absolutes are given.

    Rule: of all partial sums that of the positive parts is the largest, that of the negative the smallest.

    >>> partial(torch.tensor(2.0), torch.tensor(8.0)).item()  # 5 - 3
    5.0
    """
    return (parts + value.abs()) / 2


def _rounded(a: Measured, off: Tensor, times: int | Tensor) -> Measured:
    """Add roundings that are off by so much at most: `times off` to the worst, `times off^2 / 3` to the variance."""
    if isinstance(times, int) and times == 0:
        return a
    in_all = off if isinstance(times, int) and times == 1 else times * off
    variance = torch.addcmul(a.spread.square(), in_all, off, value=1 / 3)
    return Measured(a.value, a.worst + in_all, variance.sqrt())
