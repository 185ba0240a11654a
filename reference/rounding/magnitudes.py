"""Magnitudes: how large the rounding error of every result of the layer may be in correct code.

The layer's formula and its derivative, y_t = sum_k w_tk f_{e_tk}(x_t), in the measured numbers of `rounding.py`.
A correct implementation may round where the formula does not. It may cast the routing weights, multiply by them
first, last or inside the expert, split the hidden columns over etp ranks, add up K slots of etp parts one by
one, and a parameter's gradient rank by rank. Each such rounding is charged where it may fall.

Source: the chain rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import Gradients, WeightsAt
from moe_conformance.reference.experts import Parameters
from moe_conformance.reference.rounding.errors import Measured, Rounding, errors, exact, partial
from moe_conformance.reference.rounding.expert_magnitudes import MeasuredExperts, Routed, Sharing

ALONE = Sharing()
_AT_ONCE = 2**18  # elements of the rows, with their padding, that are measured at once: they stay in the cache


def magnitudes(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    build: Callable[[Rounding, Parameters, Sharing], MeasuredExperts],
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

    >>> from moe_conformance.reference.rounding.expert_magnitudes import MeasuredRows
    >>> def same(x, w, dy, routed):
    ...     return MeasuredRows(x, x.value.abs(), dy, dy.value.abs(), w, w.value, {})
    >>> def identity(r, parameters, sharing):
    ...     return MeasuredExperts(same, {0: 1, 1: 1})
    >>> x, ids, w = torch.tensor([[1.0, -2.0]]), torch.tensor([[0, 1, -1]]), torch.tensor([[0.5, -4.0, 9.0]])
    >>> magnitudes(x, ids[:, :2], w[:, :2], x, identity, {}, rounding=Rounding(0.5, 0.0)).y_TD
    tensor([[ 6.5000, 13.0000]], dtype=torch.float64)
    """
    of = measured(
        x_TD, ids_TK, exact(weights_TK), dy_TD, build(rounding, parameters, sharing),
        rounding=rounding, sharing=sharing, weights_at=weights_at,
    )  # fmt: skip
    dparameters = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    dparameters |= errors(of.dparameters)
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
    experts: MeasuredExperts,
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
    weighed = functools.partial(
        weigh, rounding, experts, stored_parts=2 if sharing.etp > 1 else 0
    )  # each part, and w times it
    y, dx = _SlotSum(T, D), _SlotSum(T, D)
    dw_TK = Measured(*torch.zeros(3, T, K, dtype=torch.float64))
    dparameters: dict[tuple[str, int], Measured] = {}
    ends_P = torch.tensor(sharing.places or [T]).cumsum(0)  # (P,)
    for group in _groups(ids_TK, experts.columns, D):
        t_S, k_S = group.t_S, group.k_S
        w_S = Measured(*(each[t_S, k_S] for each in _each(weights_TK)))
        rows = _Rows(
            rounding.stored(w_S.map(group.padded)),
            exact(group.padded(x_TD[t_S])),
            exact(group.padded(dy_TD[t_S])),
            Routed(group.experts, group.counts_N, group.padded(torch.bucketize(t_S, ends_P, right=True))),
        )
        of = weighed(rows)
        if bool(weights_TK.worst.any()):
            of = _with_errors_of_weights(rounding, weighed, rows, of, weights_at)
        y.add(t_S, of.y_NRD.map(group.slots), group.slots(of.y_parts_NRD))
        dx.add(t_S, of.dx_NRD.map(group.slots), group.slots(of.dx_parts_NRD))
        for whole, part in zip(_each(dw_TK), _each(of.dw_NR), strict=True):
            whole[t_S, k_S] = group.slots(part)
        for name, dparameter in of.dparameters.items():
            each = zip(*(bound.unbind() for bound in _each(dparameter)), strict=True)
            dparameters |= {(name, e): Measured(*of_e) for e, of_e in zip(group.experts, each, strict=True)}
    sums = K * sharing.etp - 1
    return MeasuredLayer(y.total(rounding, sums), dx.total(rounding, sums), dw_TK, dparameters)


class _Group(NamedTuple):
    """The slots of some experts, S of them: in the order of experts, and of tokens within an expert."""

    experts: list[int]  # N
    counts_N: Tensor  # slots of each expert
    t_S: Tensor  # token, slot, and where it is put: expert and row
    k_S: Tensor
    n_S: Tensor
    r_S: Tensor

    def padded(self, slots_S: Tensor) -> Tensor:
        """Give every expert as many rows as the one with the most, the last of them zeros: (S, ...) -> (N, R, ...)."""
        N, R = len(self.experts), int(self.counts_N.max())
        rows_NR = slots_S.new_zeros(N, R, *slots_S.shape[1:])
        rows_NR[self.n_S, self.r_S] = slots_S
        return rows_NR

    def slots(self, rows_NR: Tensor) -> Tensor:
        """Leave the padding out: (N, R, ...) -> (S, ...)."""
        return rows_NR[self.n_S, self.r_S]


def _groups(ids_TK: Tensor, columns: Mapping[int, int], D: int) -> Iterator[_Group]:
    """Put experts that are routed to into groups: next to each other, equally wide, and not too large with padding."""
    ids_S, order_S = ids_TK.flatten().sort(stable=True)
    groups: list[list[tuple[int, int]]] = []  # of experts, each with its number of slots
    end = int((ids_S < 0).sum())  # empty slots are first
    experts, counts = ids_S[end:].unique_consecutive(return_counts=True)
    for e, count in zip(experts.tolist(), counts.tolist(), strict=True):
        last = groups[-1] if groups else []
        size = (len(last) + 1) * max([count, *(of_other for _, of_other in last)]) * max(D, columns[e])
        if last and columns[e] == columns[last[0][0]] and size <= _AT_ONCE:
            last.append((e, count))
        else:
            groups.append([(e, count)])
    for group in groups:
        counts_N = torch.tensor([count for _, count in group])
        start, end = end, end + int(counts_N.sum())
        n_S = torch.arange(len(group)).repeat_interleave(counts_N)
        r_S = torch.arange(end - start) - (counts_N.cumsum(0) - counts_N)[n_S]
        places_S = order_S[start:end]
        t_S, k_S = places_S // ids_TK.shape[1], places_S % ids_TK.shape[1]
        yield _Group([e for e, _ in group], counts_N, t_S, k_S, n_S, r_S)


class _Rows(NamedTuple):
    """The rows of a group and what comes with them."""

    w_NR: Measured
    x_NRD: Measured
    dy_NRD: Measured
    routed: Routed


class _Slots(NamedTuple):
    """What the rows add to their tokens, with the sums of absolute parts; the weights' gradient."""

    y_NRD: Measured
    y_parts_NRD: Tensor
    dx_NRD: Measured
    dx_parts_NRD: Tensor
    dw_NR: Measured
    dparameters: dict[str, Measured]


def _output(r: Rounding, experts: MeasuredExperts, rows: _Rows, *, stored_parts: int) -> _Slots:
    """Weigh behind the expert, y = w f(x). <dy, f(x)> may be summed over D or over the hidden columns."""
    w_NR, w_abs_NR1 = rows.w_NR, rows.w_NR.value.abs()[..., None]
    of = experts.measure(rows.x_NRD, w_NR, rows.dy_NRD, rows.routed)
    y_parts_NRD = w_abs_NR1 * of.out_parts_NRD
    outer_NR = r.products("nrd,nrd->nr", rows.dy_NRD, of.out_NRD)
    dw_NR = (r.stored(r.stored(each, of.inner_parts_NR, stored_parts)) for each in (outer_NR, of.inner_NR))
    return _Slots(
        r.stored(r.products("nr,nrd->nrd", w_NR, of.out_NRD), y_parts_NRD, stored_parts),
        y_parts_NRD,
        r.stored(of.drows_NRD, of.drows_parts_NRD, stored_parts),
        of.drows_parts_NRD,
        _larger(*dw_NR),
        of.dparameters,
    )


def _input(r: Rounding, experts: MeasuredExperts, rows: _Rows, *, stored_parts: int) -> _Slots:
    """Weigh before the expert, y = f(w x)."""
    w_NR, w_abs_NR1 = rows.w_NR, rows.w_NR.value.abs()[..., None]
    one_NR = exact(torch.ones_like(w_NR.value))
    of = experts.measure(r.products("nr,nrd->nrd", w_NR, rows.x_NRD), one_NR, rows.dy_NRD, rows.routed)
    drows_NRD = r.stored(of.drows_NRD, of.drows_parts_NRD, stored_parts)
    return _Slots(
        r.stored(of.out_NRD, of.out_parts_NRD, stored_parts),
        of.out_parts_NRD,
        r.products("nr,nrd->nrd", w_NR, drows_NRD),
        w_abs_NR1 * of.drows_parts_NRD,
        r.stored(r.products("nrd,nrd->nr", rows.x_NRD, drows_NRD)),
        of.dparameters,
    )


def _with_errors_of_weights(
    r: Rounding, weighed: Callable[[_Rows], _Slots], rows: _Rows, of: _Slots, weights_at: WeightsAt
) -> _Slots:
    """Let y and dx inherit what the weights are off by, as it is common to all that is added up within their rows.

    No sum of squares will do there. Behind the experts dx is in proportion to w, and y has inherited it; before them
    other weights show what it does.
    """
    w = rows.w_NR
    if weights_at == "output":
        dx_NRD, w_NR1 = of.dx_NRD, w.value.abs()[..., None]
        return of._replace(dx_NRD=_inheriting(dx_NRD, torch.where(w_NR1 > 0, dx_NRD.value.abs() / w_NR1, 0.0), w))
    step = 2.0**-12
    own, less, more = (
        weighed(rows._replace(w_NR=r.stored(exact(value)))) for value in (w.value, w.value - step, w.value + step)
    )
    y_slope, dx_slope = (
        ((upper.value - lower.value) / (2 * step)).abs()
        for lower, upper in ((less.y_NRD, more.y_NRD), (less.dx_NRD, more.dx_NRD))
    )
    return of._replace(y_NRD=_inheriting(own.y_NRD, y_slope, w), dx_NRD=_inheriting(own.dx_NRD, dx_slope, w))


def _inheriting(of_NRD: Measured, slope_NRD: Tensor, w_NR: Measured) -> Measured:
    """Add the errors of one weight per row, times a slope for every element."""
    spread_NRD = (of_NRD.spread.square() + (slope_NRD * w_NR.spread[..., None]).square()).sqrt()
    return Measured(of_NRD.value, of_NRD.worst + slope_NRD * w_NR.worst[..., None], spread_NRD)


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
