"""One tensor compared exactly with its expected value, differences by row."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.judging.compare.exact import wrong
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.verdict import AbsentGradient, Mismatch, Stage, Tally, WrongForm

_SHOWN = 4  # values of a row


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
    """Require that a tensor has the shape of the expected one, and its values.

    Args:
        actual: From a rank; None where there is no gradient.
        expected: From the oracle, in any dtype that holds the values.
        tally: Counts every element, and a pair for a tensor that rightly has none.
        error: What another value is.
        stage: Where to blame.
        what: The name of the tensor in the sentence, such as "the gradient of x".
        row: The name of an entry of its first dimension.
        rank: Whose it is.

    Raises:
        AbsentGradient: there is none.
        WrongForm: another shape.
        Mismatch: of the type `error`, another value.
    """
    if actual is None:
        raise AbsentGradient(stage, f"{what} is None on rank {rank}", ranks=(rank,))
    if actual.shape != expected.shape:
        said = f"{what} has the shape {tuple(actual.shape)} on rank {rank} instead of {tuple(expected.shape)}"
        raise WrongForm(stage, said, ranks=(rank,))
    off = wrong(actual, expected)
    findings = []
    for at in off.reshape(len(off), -1).any(1).nonzero()[:, 0].tolist() if off.numel() else ():
        got, right = _values(actual[at]), _values(expected[at])
        findings.append(Finding(what, f"{row} {at} of {what} is {got} instead of {right}", (rank,)))
    if findings:
        fail(error, stage, findings)
    tally.add(elements=off.numel(), pairs=not off.numel(), rank=rank)


def _values(row: Tensor) -> str:
    listed = [format(value, "g") for value in row.reshape(-1)[:_SHOWN].double().tolist()]
    return ", ".join(listed) + (", ..." if row.numel() > _SHOWN else "")
