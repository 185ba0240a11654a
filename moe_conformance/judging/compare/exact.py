"""Exact comparison of tensors: every element equal after both sides are cast to float64."""

from __future__ import annotations

from torch import Tensor


def wrong(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a bool mask of the elements that differ, in the shape of the expected tensor.

    Zeros of either sign are equal; a NaN differs from everything. Nothing to compare gives an empty mask.

    Raises:
        ValueError: the shapes differ; whoever compares has to judge the form first.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
    return actual.double() != expected.double()
