"""Identification of a wrong row: a multiple of a known row, a mix of two, a splice or a shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CLOSE = 1e-9  # relative, of squared values; the rows are exact, only the arithmetic here rounds


def likeness(row_D: Tensor, rows_ND: Tensor, names: Sequence[str]) -> str:
    """Return a phrase that describes `row_D` in terms of N known rows, to follow "is" or "holds".

    The most specific description is returned, and the most similar row as the last resort. Called for failures only:
    it tries all pairs of rows.

    >>> known = torch.tensor([[1.0, 2.0, 4.0], [1.0, -3.0, 0.0]])
    >>> likeness(torch.tensor([2.0, -1.0, 4.0]), known, ["a", "b"])
    'the sum of a and b'
    >>> likeness(torch.tensor([2.0, 4.0, 8.0]), known, ["a", "b"])
    '2 x a'
    """
    row_D, rows_ND = row_D.double(), rows_ND.double()
    if not bool(torch.isfinite(row_D).all()):
        bad = (~torch.isfinite(row_D)).nonzero().flatten().tolist()
        return f"not finite in {column_words(bad)} (uninitialised?)"
    if not bool(row_D.any()):
        return "zero"
    if not len(rows_ND):
        return "of no token: the batch is empty"
    for attempt in (_multiple, _mix, _shift, _splice):
        said = attempt(row_D, rows_ND, names)
        if said is not None:
            return said
    return _nearest(row_D, rows_ND, names)


def column_words(columns: Sequence[int]) -> str:
    """Return the names of columns, with runs of neighbours joined.

    >>> column_words([3]), column_words([3, 4, 5]), column_words([0, 1, 7])
    ('column 3', 'columns 3..5', 'columns 0..1, 7')
    """
    runs: list[list[int]] = []
    for column in columns:
        if runs and runs[-1][-1] == column - 1:
            runs[-1].append(column)
        else:
            runs.append([column])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return f"column {said}" if len(columns) == 1 else f"columns {said}"


def _multiple(row_D: Tensor, rows_ND: Tensor, names: Sequence[str]) -> str | None:
    square_N = (rows_ND * rows_ND).sum(1)
    factor_N = (rows_ND @ row_D) / square_N.clamp_min(1e-30)
    off_N = (row_D - factor_N[:, None] * rows_ND).square().sum(1)
    best = int(off_N.argmin())
    if off_N[best] > _CLOSE * (row_D @ row_D):
        return None
    return _times(float(factor_N[best]), names[best])


def _mix(row_D: Tensor, rows_ND: Tensor, names: Sequence[str]) -> str | None:
    """Return the combination of two known rows that equals the row; all pairs are fitted by their inner products."""
    gram_NN, inner_N = rows_ND @ rows_ND.T, rows_ND @ row_D
    square_N = gram_NN.diagonal()
    det_NN = square_N[:, None] * square_N - gram_NN.square()
    apart_NN = det_NN > _CLOSE * square_N[:, None] * square_N
    first_NN = (square_N * inner_N[:, None] - gram_NN * inner_N) / torch.where(apart_NN, det_NN, 1.0)
    fitted_NN = first_NN * inner_N[:, None] + first_NN.T * inner_N
    fitted_NN = torch.where(apart_NN, fitted_NN, 0.0)
    a, b = divmod(int(fitted_NN.argmax()), len(names))
    if a == b:
        return None
    p, q = float(first_NN[a, b]), float(first_NN[b, a])
    off_D = row_D - p * rows_ND[a] - q * rows_ND[b]
    if float(off_D @ off_D) > _CLOSE * float(row_D @ row_D):
        return None
    (p, a), (q, b) = sorted(((round(p, 9), a), (round(q, 9), b)), key=lambda term: term[1])
    if p == q == 1:
        return f"the sum of {names[a]} and {names[b]}"
    if p == q == 0.5:
        return f"the mean of {names[a]} and {names[b]}"
    if sorted((p, q)) == [-1, 1]:
        return f"the difference of {names[a if p == 1 else b]} and {names[b if p == 1 else a]}"
    return f"{_times(p, names[a])} + {_times(q, names[b])}"


def _shift(row_D: Tensor, rows_ND: Tensor, names: Sequence[str]) -> str | None:
    for by in range(1, len(row_D)):
        said = _multiple(row_D.roll(-by), rows_ND, names)
        if said is not None:
            return (
                f"{said}, shifted by {min(by, len(row_D) - by)} columns {'right' if by <= len(row_D) // 2 else 'left'}"
            )
    return None


def _splice(row_D: Tensor, rows_ND: Tensor, names: Sequence[str]) -> str | None:
    """Return the two rows whose beginning and end the row is made of; zeros count as a known row."""
    D, names = len(row_D), [*names, "zero"]
    known_ND = torch.cat([rows_ND, torch.zeros_like(rows_ND[:1])])
    same_ND = known_ND == row_D
    head_N = same_ND.long().cumprod(1).sum(1)
    tail_N = same_ND.flip(1).long().cumprod(1).sum(1)
    head, tail = int(head_N.argmax()), int(tail_N.argmax())
    cut = int(head_N[head])
    if cut + int(tail_N[tail]) < D or min(cut, D - cut) < D // 8:
        return None
    return f"{names[head]} in columns 0..{cut - 1} and {names[tail]} in columns {cut}..{D - 1}"


def _nearest(row_D: Tensor, rows_ND: Tensor, names: Sequence[str]) -> str:
    differs_ND = rows_ND != row_D
    best = int(differs_ND.sum(1).argmin())
    odd = differs_ND[best].nonzero().flatten().tolist()
    if len(odd) <= len(row_D) // 4:
        return f"{names[best]} except in {column_words(odd)}"
    return "not the row of a token, nor a multiple or a sum of two"


def _times(factor: float, name: str) -> str:
    factor = round(factor, 9)
    return name if factor == 1 else f"{factor:g} x {name}"
