"""Comparison of tensors within an error bound per element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare import bounds
from moe_conformance.judging.comparisons import Comparison
from moe_conformance.judging.findings import Finding, common_ratio
from moe_conformance.judging.verdict import MOST, Deviation, Tally


class Target(NamedTuple):
    """An expected tensor in float64, and the allowed absolute error of every element."""

    expected: Tensor
    allowed: Tensor


@dataclass(frozen=True)
class Worst:
    """The element whose error is the largest relative to its bound."""

    ratio: float  # observed / allowed error; inf for NaN, for infinity and where no error is allowed
    at: tuple[int, ...] = ()
    actual: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0
    exact: bool = field(default=False, repr=False)  # no element may have an error, and one has

    @property
    def holds(self) -> bool:
        """Whether every element is within its bound."""
        return self.ratio <= 1

    @property
    def size(self) -> float:
        """The ratio of error to bound as a finite number, for sorting findings."""
        return min(self.ratio, MOST)

    @property
    def counted(self) -> float:
        """The ratio as `Tally` has it: a finite number, 0 if no error was allowed and the wrong element is finite."""
        return 0.0 if self.exact and isfinite(self.actual) else self.size

    def __str__(self) -> str:
        """Return a phrase such as `1.5 instead of 2 at [0, 3] (12.1 x the allowed error 0.041)`."""
        index = f" at [{', '.join(map(str, self.at))}]" if self.at else ""
        times = f"{self.ratio:.3g} x the allowed error {self.allowed:.2g}"
        if not isfinite(self.ratio):
            times = "exact equality is required" if isfinite(self.actual) else "not finite"
        digits = 6 if f"{self.actual:.6g}" != f"{self.expected:.6g}" else 17
        return f"{self.actual:.{digits}g} instead of {self.expected:.{digits}g}{index} ({times})"


def compare(
    actual: Tensor, expected: Tensor, allowed: Tensor, tally: Tally | None = None, rank: int | None = None
) -> Worst:
    """Compare every element with its bound and return the worst one.

    If all elements are within their bounds, the tally counts them; otherwise it records how far off they are.

    A value that is not finite is never within its bound. An element whose allowed error is 0 has to be equal. An
    empty tensor holds with ratio 0 and counts nothing.

    >>> one = torch.ones(2)
    >>> compare(torch.tensor([1.5, 1.0]), one, one)
    Worst(ratio=0.5, at=(0,), actual=1.5, expected=1.0, allowed=1.0)
    >>> compare(torch.tensor([1.0, torch.nan]), one, one).holds
    False

    Raises:
        ValueError: the shapes differ; whoever compares has to judge the form first.
    """
    if not actual.shape == expected.shape == allowed.shape:
        shapes = (tuple(actual.shape), tuple(expected.shape), tuple(allowed.shape))
        raise ValueError(f"cannot compare shape {shapes[0]} with {shapes[1]} within {shapes[2]}")
    if not actual.numel():
        return Worst(0.0)
    ratio = _ratios(actual, expected, allowed)
    flat = int(ratio.argmax())
    at = _index(flat, ratio.shape)
    exact = float(ratio[at]) > 1 and not bool((allowed > 0).any())
    worst = Worst(float(ratio[at]), at, float(actual[at]), float(expected[at]), float(allowed[at]), exact)
    if tally is not None:
        if worst.holds:
            tally.add(elements=actual.numel(), rank=rank, worst=worst.ratio)
        else:
            tally.beyond = max(tally.beyond, worst.counted)
    return worst


def compared(
    rank: int, worst: Worst, kind: str, wrong: str, elements: int, deviation: Deviation | None = None
) -> Comparison:
    """Return the comparison of a number of elements on a rank, with a finding if the worst is out of its bound."""
    found = () if worst.holds else (Finding(kind, wrong, (rank,), worst.size),)
    return Comparison(rank, found, elements=elements, worst=worst.counted, deviation=deviation)


def note_beyond(tally: Tally, actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    """Record in a tally how far elements are out of their bounds, for a judge that compares without `compare`.

    Elements within their bounds are not counted.
    """
    with tally.uncounted() as uncounted:
        compare(actual, expected, allowed, uncounted)


def within(actual: Tensor, expected: Tensor, allowed: Tensor) -> bool:
    """Return whether the shapes agree and every element is within its bound, like `compare` but without a tally.

    >>> within(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), torch.zeros(2))
    False
    """
    return actual.shape == expected.shape and bool(((actual.double() - expected).abs() <= allowed).all())


def factor(actual: Tensor, expected: Tensor, allowed: Tensor, names: Mapping[str, float]) -> float | None:
    """Return the factor by which actual differs from expected, within rounding, or None if there is none.

    The named factors are tried first, so that a factor that has a name is returned exactly. Returns None for a correct
    tensor, and where no expected element is larger than its allowed error.

    >>> factor(torch.tensor([2.01, 4.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.1]), {"ep": 2.0})
    2.0
    """
    if actual.shape != expected.shape or not bool((expected.abs() > allowed).any()):
        return None
    if within(actual, expected, allowed):
        return None
    for named in dict.fromkeys([*names.values(), 0.0, -1.0]):
        if within(actual, named * expected, abs(named) * allowed):
            return named
    tolerance = float(allowed.max() / expected.abs().max())
    ratio = common_ratio(actual, expected, tolerance)
    if ratio is None or not within(actual, ratio * expected, max(abs(ratio), 1) * allowed):
        return None
    return ratio


_UNITS = 32  # the largest error may be this many times larger or smaller than a unit of the narrower dtype


def too_narrow(actual: Tensor, target: Target, dtype: torch.dtype) -> str | None:
    """Return the words for a result that was computed in a narrower dtype than its own, or None.

    Bounds are those of the worst case and far wider than most errors of the narrower dtype. So the largest error must
    also be a few roundoff units of that dtype, relative to the largest element. Errors of float16 and of bfloat16
    differ by less than they vary, and cannot be distinguished.
    """
    if actual.shape != target.expected.shape or not target.expected.numel():
        return None
    error = float((actual.double() - target.expected).abs().max() / target.expected.abs().max())
    half = "bfloat16" if dtype == torch.float16 else "bfloat16 or float16"
    for narrow, name in ((torch.float32, "float32"), (torch.bfloat16, half)):
        unit = bounds.unit_roundoff(narrow)
        times = unit / bounds.unit_roundoff(dtype)
        fits = unit / _UNITS < error < unit * _UNITS
        if times > 1 and fits and within(actual, target.expected, times * target.allowed):
            return f"computed with the precision of {name} instead of {str(dtype).removeprefix('torch.')}"
    return None


def _ratios(actual: Tensor, expected: Tensor, allowed: Tensor) -> Tensor:
    off = (actual.double() - expected.double()).abs()
    ratio = torch.where(off == 0, 0.0, off / allowed)  # 0 / 0 is an exact zero, and x / 0 is infinite
    return ratio.nan_to_num(nan=inf, posinf=inf)  # NaN is infinite, and so is what is not finite: inf - inf is NaN


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element, given its position in the flattened tensor.

    >>> _index(7, (2, 5))
    (1, 2)
    """
    index = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))
