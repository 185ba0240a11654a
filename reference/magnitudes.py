"""Magnitudes: how large an honest rounding error of every result of the layer may be.

The layer's formula and its derivative, y_t = sum_k w_tk f_{e_tk}(x_t), in the measured numbers of `rounding.py`.
An honest implementation may round where the formula does not. It may cast the routing weights, multiply by them
first, last or inside the expert, split the hidden columns over etp ranks, add up K slots of etp parts one by
one, and a parameter's gradient rank by rank. Each such rounding is charged where it may fall.

Source: the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from reference.expert_magnitudes import MeasuredExpert, Sharing
from reference.experts import Parameters
from reference.layer import Gradients, WeightsAt
from reference.rounding import Measured, Rounding, exact, partial

ALONE = Sharing()


def magnitudes(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    build: Callable[[Rounding, Parameters, Sharing], MeasuredExpert],
    parameters: Parameters,
    *,
    rounding: Rounding,
    sharing: Sharing = ALONE,
    weights_at: WeightsAt = "output",
) -> Gradients:
    """Measure everything that `layer.gradients` returns: the same fields, holding errors.

    Rule: the layer's formula and its derivative in measured numbers. Where every addend is 0 so is the error, and
    an implementation must return 0 exactly. For gradients over all ranks, measure the `layer.global_batch`.

    With an expert that returns its rows, u = 1/2 and v = 0, both slots are stored after a cast of their weights (4.5),
    and added up to -3.5 at most to -4 (2):

    >>> from reference.expert_magnitudes import MeasuredRows
    >>> def identity(r, parameters, sharing):
    ...     return lambda x, w, dy, e, places: MeasuredRows(x, x.value.abs(), dy, dy.value.abs(), w, w.value, {})
    >>> x, ids, w = torch.tensor([[1.0, -2.0]]), torch.tensor([[0, 1, -1]]), torch.tensor([[0.5, -4.0, 9.0]])
    >>> magnitudes(x, ids[:, :2], w[:, :2], x, identity, {}, rounding=Rounding(0.5, 0.0)).y_TD
    tensor([[ 6.5000, 13.0000]], dtype=torch.float64)
    """
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    expert, weigh = build(rounding, parameters, sharing), _output if weights_at == "output" else _input
    y, dx, dw_TK = _SlotSum(T, D), _SlotSum(T, D), torch.zeros(T, K, dtype=torch.float64)
    dparameters = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    ends_P = torch.tensor(sharing.places or [T]).cumsum(0)  # (P,)
    for e in ids_TK.unique().tolist():
        if e < 0:
            continue
        t_R, k_R = (ids_TK == e).nonzero(as_tuple=True)  # (R,) each, in the order of tokens
        places = torch.bucketize(t_R, ends_P, right=True).bincount(minlength=len(ends_P)).tolist()
        w_R = rounding.stored(exact(weights_TK[t_R, k_R]))
        rows = _Rows(w_R, exact(x_TD[t_R]), exact(dy_TD[t_R]), e, places)
        of = weigh(rounding, expert, rows, 2 if sharing.etp > 1 else 0)  # parts, and their products with w
        y.add(t_R, of.y_RD, of.y_parts_RD)
        dx.add(t_R, of.dx_RD, of.dx_parts_RD)
        dw_TK[t_R, k_R] = of.dw_error_R
        dparameters |= {(name, e): measured.error for name, measured in of.dparameters.items()}
    sums = K * sharing.etp - 1
    return Gradients(y.error(rounding, sums), dx.error(rounding, sums), dw_TK, dparameters)


class _Rows(NamedTuple):
    """The rows of one expert and what comes with them."""

    w_R: Measured
    x_RD: Measured
    dy_RD: Measured
    e: int
    places: list[int]


class _Slots(NamedTuple):
    """What the rows add to their tokens, with the sums of absolute parts; the error of the weights' gradient."""

    y_RD: Measured
    y_parts_RD: Tensor
    dx_RD: Measured
    dx_parts_RD: Tensor
    dw_error_R: Tensor
    dparameters: dict[str, Measured]


def _output(r: Rounding, expert: MeasuredExpert, rows: _Rows, stored_parts: int) -> _Slots:
    """Weigh behind the expert, y = w f(x). <dy, f(x)> may be summed over D or over the hidden columns."""
    w_R, w_abs_R1 = rows.w_R, rows.w_R.value.abs()[:, None]
    of = expert(rows.x_RD, w_R, rows.dy_RD, rows.e, rows.places)
    y_parts_RD = w_abs_R1 * of.out_parts_RD
    outer_R = r.products("rd,rd->r", rows.dy_RD, of.out_RD)
    dw_R = (r.stored(r.stored(each, of.inner_parts_R, stored_parts)).error for each in (outer_R, of.inner_R))
    return _Slots(
        r.stored(r.products("r,rd->rd", w_R, of.out_RD), y_parts_RD, stored_parts),
        y_parts_RD,
        r.stored(of.drows_RD, of.drows_parts_RD, stored_parts),
        of.drows_parts_RD,
        torch.maximum(*dw_R),
        of.dparameters,
    )


def _input(r: Rounding, expert: MeasuredExpert, rows: _Rows, stored_parts: int) -> _Slots:
    """Weigh before the expert, y = f(w x)."""
    w_R, w_abs_R1 = rows.w_R, rows.w_R.value.abs()[:, None]
    one_R = exact(torch.ones_like(w_R.value))
    of = expert(r.products("r,rd->rd", w_R, rows.x_RD), one_R, rows.dy_RD, rows.e, rows.places)
    drows_RD = r.stored(of.drows_RD, of.drows_parts_RD, stored_parts)
    return _Slots(
        r.stored(of.out_RD, of.out_parts_RD, stored_parts),
        of.out_parts_RD,
        r.products("r,rd->rd", w_R, drows_RD),
        w_abs_R1 * of.drows_parts_RD,
        r.stored(r.products("rd,rd->r", rows.x_RD, drows_RD)).error,
        of.dparameters,
    )


class _SlotSum:
    """A sum over slots, of which different experts make errors of their own, (T, D)."""

    def __init__(self, T: int, D: int) -> None:
        """Start at nothing."""
        self._value, self._worst, self._variance, self._parts = torch.zeros(4, T, D, dtype=torch.float64)

    def add(self, t_R: Tensor, slots_RD: Measured, parts_RD: Tensor) -> None:
        """Add one slot to each of some tokens, given the sum of its absolute parts."""
        self._value.index_add_(0, t_R, slots_RD.value)
        self._worst.index_add_(0, t_R, slots_RD.worst)
        self._variance.index_add_(0, t_R, slots_RD.spread.square())
        self._parts.index_add_(0, t_R, parts_RD)

    def error(self, r: Rounding, sums: int) -> Tensor:
        """Return what the sum may be off by, having been stored so many times on the way."""
        whole = Measured(self._value, self._worst, self._variance.sqrt())
        return r.stored(whole, partial(self._value, self._parts), sums).error
