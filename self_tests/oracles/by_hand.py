"""Values worked out by hand: rows of (sentence, arguments, expected), each asked of both oracles by one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from self_tests.oracles.asked_twice import assert_refused, in_torch

# A few roundings of float64.
RELATIVE, ABSOLUTE = 1e-14, 1e-15


class Refused:
    """What is expected where a question has no answer: both oracles raise ValueError."""


REFUSED = Refused()


@dataclass(frozen=True)
class Row:
    """One example: a true sentence, the two oracles, what they are asked, and the answer."""

    sentence: str
    first: Callable[..., Any]
    second: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any]
    expected: Any

    def check(self) -> None:
        """Fail unless both oracles answer as expected; the first is given tensors for arrays."""
        if self.expected is REFUSED:
            assert_refused(self.first, self.second, *self.arguments, **self.options)
            return
        assert_same(self.expected, self.second(*self.arguments, **self.options))
        options = {name: in_torch(value) for name, value in self.options.items()}
        assert_same(self.expected, self.first(*map(in_torch, self.arguments), **options))


def rows(first: Callable[..., Any], second: Callable[..., Any], *table: tuple[Any, ...]) -> Iterator[Row]:
    """Yield the rows of one function: (sentence, arguments, expected), with a dict of options before expected."""
    for sentence, arguments, *options, expected in table:
        yield Row(sentence, first, second, arguments, options[0] if options else {}, expected)


def by_hand(*examples: Row) -> Callable[[Row], None]:
    """Return a test of all these rows."""

    @pytest.mark.parametrize("row", examples, ids=[row.sentence for row in examples])
    def test(row: Row) -> None:
        """Both oracles give what was worked out by hand."""
        row.check()

    return test


def assert_same(expected: Any, actual: Any) -> None:
    """Fail unless both have the same shape and types, equal whole numbers, and floats equal up to a few roundings.

    A list or tuple stands for a list, a tuple, or an array with these rows. An array is expected where the shape of
    an empty one matters.
    """
    if isinstance(actual, Tensor):
        assert actual.dtype in (torch.int64, torch.bool, torch.float64), actual.dtype
        actual = actual.detach().numpy()
    if isinstance(expected, np.ndarray):
        assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
        expected = expected.tolist()
    if isinstance(actual, (np.ndarray, np.generic)):
        actual = actual.tolist()
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple)), actual
        assert len(expected) == len(actual), f"{expected} == {actual}"
        for one, other in zip(expected, actual, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert isinstance(actual, float), actual
        assert expected == pytest.approx(actual, rel=RELATIVE, abs=ABSOLUTE, nan_ok=True)
    else:
        whole = (int, Fraction) if type(expected) in (int, Fraction) else type(expected)
        assert isinstance(actual, whole), f"{expected!r} == {actual!r}"
        assert expected == actual
