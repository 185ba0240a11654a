"""Magnitudes: how large the rounding error of every result of the layer may be in correct code.

The layer's formula and its derivative, y_t = sum_k w_tk f_{e_tk}(x_t), in the measured numbers of `rounding.py`.
A correct implementation may round where the formula does not. It may cast the routing weights, multiply by them
first, last or inside the expert, split the hidden columns over etp ranks, add up K slots of etp parts one by
one, and a parameter's gradient rank by rank. Each such rounding is charged where it may fall.

Source: the chain rule.
"""

from __future__ import annotations

import functools
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
    of = measured(
        x_TD, ids_TK, exact(weights_TK), dy_TD, build(rounding, parameters, sharing),
        rounding=rounding, sharing=sharing, weights_at=weights_at,
    )  # fmt: skip
    dparameters = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    dparameters |= {key: each.error for key, each in of.dparameters.items()}
    return Gradients(of.y_TD.error, of.dx_TD.error, of.dw_TK.error, dparameters)


class MeasuredLayer(NamedTuple):
    """Everything that the layer yields; of the parameters only those of experts that are routed to."""

    y_TD: Measured
    dx_TD: Measured
    dw_TK: Measured
    dparameters: dict[tuple[str, int], Measured]


def measured(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Measured,
    dy_TD: Tensor,
    expert: MeasuredExpert,
    *,
    rounding: Rounding,
    sharing: Sharing = ALONE,
    weights_at: WeightsAt = "output",
) -> MeasuredLayer:
    """Measure the layer with weights that may have errors of their own, as those of a router have.

    Rule: as `magnitudes`.
    """
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    weigh = _output if weights_at == "output" else _input
    y, dx = _SlotSum(T, D), _SlotSum(T, D)
    dw_TK = Measured(*torch.zeros(3, T, K, dtype=torch.float64))
    dparameters: dict[tuple[str, int], Measured] = {}
    ends_P = torch.tensor(sharing.places or [T]).cumsum(0)  # (P,)
    for e in ids_TK.unique().tolist():
        if e < 0:
            continue
        t_R, k_R = (ids_TK == e).nonzero(as_tuple=True)  # (R,) each, in the order of tokens
        places = torch.bucketize(t_R, ends_P, right=True).bincount(minlength=len(ends_P)).tolist()
        w_R = rounding.stored(Measured(*(each[t_R, k_R] for each in _each(weights_TK))))
        rows = _Rows(w_R, exact(x_TD[t_R]), exact(dy_TD[t_R]), e, places)
        parts = 2 if sharing.etp > 1 else 0  # every part is stored, and its product with w
        weighed = functools.partial(weigh, rounding, expert, stored_parts=parts)
        of = weighed(rows)
        if bool(weights_TK.worst.any()):
            of = _with_errors_of_weights(rounding, weighed, rows, of, weights_at)
        y.add(t_R, of.y_RD, of.y_parts_RD)
        dx.add(t_R, of.dx_RD, of.dx_parts_RD)
        for whole, part in zip(_each(dw_TK), _each(of.dw_R), strict=True):
            whole[t_R, k_R] = part
        dparameters |= {(name, e): each for name, each in of.dparameters.items()}
    sums = K * sharing.etp - 1
    return MeasuredLayer(y.total(rounding, sums), dx.total(rounding, sums), dw_TK, dparameters)


class _Rows(NamedTuple):
    """The rows of one expert and what comes with them."""

    w_R: Measured
    x_RD: Measured
    dy_RD: Measured
    e: int
    places: list[int]


class _Slots(NamedTuple):
    """What the rows add to their tokens, with the sums of absolute parts; the weights' gradient."""

    y_RD: Measured
    y_parts_RD: Tensor
    dx_RD: Measured
    dx_parts_RD: Tensor
    dw_R: Measured
    dparameters: dict[str, Measured]


def _output(r: Rounding, expert: MeasuredExpert, rows: _Rows, *, stored_parts: int) -> _Slots:
    """Weigh behind the expert, y = w f(x). <dy, f(x)> may be summed over D or over the hidden columns."""
    w_R, w_abs_R1 = rows.w_R, rows.w_R.value.abs()[:, None]
    of = expert(rows.x_RD, w_R, rows.dy_RD, rows.e, rows.places)
    y_parts_RD = w_abs_R1 * of.out_parts_RD
    outer_R = r.products("rd,rd->r", rows.dy_RD, of.out_RD)
    dw_R = (r.stored(r.stored(each, of.inner_parts_R, stored_parts)) for each in (outer_R, of.inner_R))
    return _Slots(
        r.stored(r.products("r,rd->rd", w_R, of.out_RD), y_parts_RD, stored_parts),
        y_parts_RD,
        r.stored(of.drows_RD, of.drows_parts_RD, stored_parts),
        of.drows_parts_RD,
        _larger(*dw_R),
        of.dparameters,
    )


def _input(r: Rounding, expert: MeasuredExpert, rows: _Rows, *, stored_parts: int) -> _Slots:
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
        r.stored(r.products("rd,rd->r", rows.x_RD, drows_RD)),
        of.dparameters,
    )


def _with_errors_of_weights(
    r: Rounding, weighed: Callable[[_Rows], _Slots], rows: _Rows, of: _Slots, weights_at: WeightsAt
) -> _Slots:
    """Let y and dx inherit what the weights are off by, as it is common to all that is added up within their rows.

    No sum of squares will do there. Behind the experts dx is in proportion to w, and y has inherited it; before them
    other weights show what it does.
    """
    w = rows.w_R
    if weights_at == "output":
        dx_RD, w_R1 = of.dx_RD, w.value.abs()[:, None]
        return of._replace(dx_RD=_inheriting(dx_RD, torch.where(w_R1 > 0, dx_RD.value.abs() / w_R1, 0.0), w))
    step = 2.0**-12
    own, less, more = (
        weighed(rows._replace(w_R=r.stored(exact(value)))) for value in (w.value, w.value - step, w.value + step)
    )
    y_slope, dx_slope = (
        ((upper.value - lower.value) / (2 * step)).abs()
        for lower, upper in ((less.y_RD, more.y_RD), (less.dx_RD, more.dx_RD))
    )
    return of._replace(y_RD=_inheriting(own.y_RD, y_slope, w), dx_RD=_inheriting(own.dx_RD, dx_slope, w))


def _inheriting(of_RD: Measured, slope_RD: Tensor, w_R: Measured) -> Measured:
    """Add the errors of one weight per row, times a slope for every element."""
    spread_RD = (of_RD.spread.square() + (slope_RD * w_R.spread[:, None]).square()).sqrt()
    return Measured(of_RD.value, of_RD.worst + slope_RD * w_R.worst[:, None], spread_RD)


def _each(of: Measured) -> tuple[Tensor, Tensor, Tensor]:
    return of.value, of.worst, of.spread


def _larger(a: Measured, b: Measured) -> Measured:
    """Take the larger bounds of two ways to the same value."""
    return Measured(a.value, torch.maximum(a.worst, b.worst), torch.maximum(a.spread, b.spread))


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

    def total(self, r: Rounding, sums: int) -> Measured:
        """Return the sum, having been stored so many times on the way."""
        whole = Measured(self._value, self._worst, self._variance.sqrt())
        return r.stored(whole, partial(self._value, self._parts), sums)
