"""What it means that two oracles agree: the same shape, float64 on both sides, and rounding apart at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

# A few thousand roundings of float64: of the value or, where addends cancel, of the largest one beside it.
RELATIVE = 1e-12


def assert_close(expected: NDArray[np.float64], actual: Tensor, *, addend: float = 0.0) -> None:
    """Fail unless both are float64, of one shape, finite, and equal up to rounding.

    `addend` is how large the addends of an element can be where they may all but cancel.
    """
    assert (torch.float64, expected.shape) == (actual.dtype, tuple(actual.shape))
    largest = float(np.abs(expected).max(initial=addend))
    assert np.isfinite(largest), expected
    np.testing.assert_allclose(
        actual.detach().numpy(), expected, rtol=RELATIVE, atol=RELATIVE * largest, equal_nan=False
    )


def floats(array: NDArray[np.float64], *, leaf: bool = False) -> Tensor:
    """Float64 tensor with memory of its own; as a leaf, autograd keeps its gradient."""
    return torch.tensor(array, dtype=torch.float64, requires_grad=leaf)


def ints(values: Sequence[Any]) -> Tensor:
    """Int64 tensor, also of nothing, for which torch would choose a floating type."""
    return torch.tensor(values, dtype=torch.int64)


def check_refused(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Fail unless neither oracle has an answer."""
    for oracle in (first, second):
        with pytest.raises(ValueError, match=r"."):
            oracle()
