"""Exact comparison of tensors, and a judge of one: shape and exact values; differences are listed by row."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.verdict import AbsentGradient, Mismatch, Stage, Tally, WrongForm

_SHOWN = 4  # number of values of a row that a message lists


def wrong(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a bool mask of the elements that differ as float64, in the shape of the expected tensor.

    Zeros of either sign are equal; a NaN differs from everything. Nothing to compare gives an empty mask.

    Raises:
        ValueError: the shapes differ; whoever compares has to judge the form first.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
    return actual.double() != expected.double()


def judge_tensor(
    actual: Tensor | None,
    expected: Tensor,
    tally: Tally,
    *,
    error: type[Mismatch],
    stage: Stage,
    what: str,
    row: str = "row",
    rank: int = 0,
) -> None:
    """Require that a tensor has the shape and the exact values of the expected one.

    Args:
        actual: From a rank; None where there is no gradient.
        expected: From the oracle, in any dtype that holds the values.
        tally: Counts every element, and a pair for a tensor that rightly has none.
        error: The type of mismatch for a wrong value.
        stage: The stage that a failure names.
        what: The name of the tensor in the sentence, such as "the gradient of x".
        row: The name of an entry of its first dimension.
        rank: The rank that the tensor is from.

    Raises:
        AbsentGradient: the tensor is None.
        WrongForm: the shape is wrong.
        Mismatch: of the type `error`, a value is wrong.
    """
    if actual is None:
        raise AbsentGradient(stage, f"{what} is None on rank {rank}", ranks=(rank,))
    if actual.shape != expected.shape:
        said = f"{what} has the shape {tuple(actual.shape)} on rank {rank} instead of {tuple(expected.shape)}"
        raise WrongForm(stage, said, ranks=(rank,))
    off = wrong(actual, expected)
    rows = off.reshape(len(off), -1).any(1).nonzero()[:, 0].tolist() if off.numel() else ()
    words = {at: f"{_values(actual[at])} instead of {_values(expected[at])}" for at in rows}
    findings = [Finding(what, f"{row} {at} of {what} is {values}", (rank,)) for at, values in words.items()]
    if findings:
        fail(error, stage, findings)
    tally.add(elements=off.numel(), pairs=not off.numel(), rank=rank)


def _values(row: Tensor) -> str:
    listed = [format(value, "g") for value in row.reshape(-1)[:_SHOWN].double().tolist()]
    return ", ".join(listed) + (", ..." if row.numel() > _SHOWN else "")


def projection(actual_D: Tensor, unit_D: Tensor) -> float:
    """Return the factor of `unit_D` in `actual_D`, by least squares; 0 where `unit_D` is zero."""
    actual_D, unit_D = torch.nan_to_num(actual_D.double()), unit_D.double()
    return float(actual_D @ unit_D) / (float(unit_D @ unit_D) or 1.0)
