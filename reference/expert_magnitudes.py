"""Magnitudes of experts: how large the rounding errors of what one expert makes of its rows may be.

SwiGLU and its derivative in the measured numbers of `rounding.py`. The derivative is written out by hand, as
autograd carries no errors; that its values are those of autograd is checked in `magnitudes.py`.

Source: the chain rule; SwiGLU as in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference.experts import Parameters
from reference.rounding import Measured, Rounding, exact, partial, parts_of


class Sharing(NamedTuple):
    """How the work may be shared out, so that sums are made of parts that are stored."""

    etp: int = 1  # parts of an expert's hidden columns
    places: Sequence[int] = ()  # how many tokens, in order, a rank has at a time; () for all of them
    sums: int = 0  # roundings of a parameter's gradient: of its parts by place, and of sums of these


class MeasuredRows(NamedTuple):
    """What an expert makes of R rows, out = f(rows), and the gradients of weight * out.

    "Parts" are the sums of the absolute parts that may have been added up, as every etp rank makes one.
    """

    out_RD: Measured
    out_parts_RD: Tensor
    drows_RD: Measured
    drows_parts_RD: Tensor
    inner_R: Measured  # <dL/dy, out>, summed over the hidden columns inside the expert
    inner_parts_R: Tensor
    dparameters: dict[str, Measured]


MeasuredExpert = Callable[[Measured, Measured, Measured, int, Sequence[int]], MeasuredRows]
"""(rows (R, D), weights (R,), dL/dy (R, D), expert id, how many rows are each place's) -> what it makes of them"""


def swiglu_measured(r: Rounding, parameters: Parameters, sharing: Sharing) -> MeasuredExpert:
    """Make the measured twin of `experts.swiglu_experts`.

    >>> from reference.experts import swiglu
    >>> p = [torch.arange(8.0).sin().double().reshape(size) for size in ((4, 2), (4, 2), (2, 4))]
    >>> x, dy, w = (torch.arange(n).cos().double().reshape(5, -1) for n in (10.0, 10.0, 5.0))
    >>> expert = swiglu_measured(Rounding(1.0, 1.0), dict(zip([("gate", 7), ("up", 7), ("down", 7)], p)), Sharing())
    >>> of = expert(exact(x), exact(w.flatten()), exact(dy), 7, [5])
    >>> leaves = [leaf.requires_grad_() for leaf in (x.clone(), *p)]
    >>> out = swiglu(*leaves)
    >>> expected = [out, (out * dy).sum(1), *torch.autograd.grad(out, leaves, w * dy)]
    >>> found = [of.out_RD, of.inner_R, of.drows_RD, *of.dparameters.values()]
    >>> [torch.allclose(measured.value, value) for measured, value in zip(found, expected)]
    [True, True, True, True, True, True]
    """

    def expert(x_RD: Measured, w_R: Measured, dy_RD: Measured, e: int, places: Sequence[int]) -> MeasuredRows:
        gate_FD, up_FD, down_DF = (exact(parameters[name, e]) for name in ("gate", "up", "down"))
        z_RF = r.products("rd,fd->rf", x_RD, gate_FD)
        up_RF = r.products("rd,fd->rf", x_RD, up_FD)
        silu_RF = r.silu(z_RF)
        hidden_RF = r.stored(r.products("rf,rf->rf", silu_RF, up_RF))  # once more where the weight multiplies here
        out_RD = r.products("rf,df->rd", hidden_RF, down_DF)

        inner_RF = r.products("rd,df->rf", dy_RD, down_DF)
        dhidden_RF = r.products("r,rf->rf", w_R, inner_RF)
        dup_RF = r.products("rf,rf->rf", dhidden_RF, silu_RF)
        dsilu_RF = r.products("rf,rf->rf", dhidden_RF, up_RF)
        dz_RF = r.products("rf,rf->rf", dsilu_RF, r.silu_slope(z_RF))
        by_gate_RD, by_up_RD = r.products("rf,fd->rd", dz_RF, gate_FD), r.products("rf,fd->rd", dup_RF, up_FD)
        dy_RD_weighted = r.products("r,rd->rd", w_R, dy_RD)

        columns = [len(part) for part in torch.arange(down_DF.value.shape[1]).tensor_split(sharing.etp)]
        dparameters = {}
        for name, formula, a, b in (
            ("gate", "rf,rd->fd", dz_RF, x_RD),
            ("up", "rf,rd->fd", dup_RF, x_RD),
            ("down", "rd,rf->df", dy_RD_weighted, hidden_RF),
        ):
            whole = r.products(formula, a, b)
            largest = partial(whole.value, parts_of(formula, a, b, "r", places))
            dparameters[name] = r.stored(whole, of=largest, times=sharing.sums)
        return MeasuredRows(
            out_RD,
            parts_of("rf,df->rd", hidden_RF, down_DF, "f", columns),
            r.plus(by_gate_RD, by_up_RD),
            parts_of("rf,fd->rd", dz_RF, gate_FD, "f", columns) + parts_of("rf,fd->rd", dup_RF, up_FD, "f", columns),
            r.products("rf,rf->r", inner_RF, hidden_RF),
            parts_of("rf,rf->r", inner_RF, hidden_RF, "f", columns),
            dparameters,
        )

    return expert


def biased(r: Rounding, expert: MeasuredExpert, biases: Mapping[int, Tensor], sharing: Sharing) -> MeasuredExpert:
    """Add an output bias to the answers of experts that have one, (D,) by expert id, and measure its gradient.

    The bias is added to the sum of the parts, or is one part more.

    >>> from reference.expert_magnitudes import MeasuredRows
    >>> def silent(x, w, dy, e, places):
    ...     zero_RD, zero_R = exact(torch.zeros_like(x.value)), exact(torch.zeros_like(w.value))
    ...     return MeasuredRows(zero_RD, zero_RD.value, zero_RD, zero_RD.value, zero_R, zero_R.value, {})
    >>> rows, w, dy = (exact(torch.tensor(value)) for value in ([[1.0], [1.0]], [0.5, 0.25], [[3.0], [-4.0]]))
    >>> of = biased(Rounding(0.5, 0.0), silent, {7: torch.tensor([6.0])}, Sharing())(rows, w, dy, 7, [2])
    >>> of.out_RD.value.tolist(), of.out_RD.worst.tolist(), of.inner_R.value.tolist()
    ([[6.0], [6.0]], [[3.0], [3.0]], [18.0, -24.0])
    >>> of.dparameters["bias"].value.tolist()  # 0.5 3 - 0.25 4
    [0.5]
    """

    def answer(x_RD: Measured, w_R: Measured, dy_RD: Measured, e: int, places: Sequence[int]) -> MeasuredRows:
        of = expert(x_RD, w_R, dy_RD, e, places)
        if e not in biases:
            return of
        bias_D, R = biases[e].double(), len(of.out_RD.value)
        inner_R = r.products("rd,d->r", dy_RD, exact(bias_D))
        dbias_D = r.products("r,rd->d", w_R, dy_RD)
        largest_D = partial(dbias_D.value, parts_of("r,rd->d", w_R, dy_RD, "r", places))
        return of._replace(
            out_RD=r.plus(of.out_RD, exact(bias_D.expand(R, -1))),
            out_parts_RD=of.out_parts_RD + bias_D.abs(),
            inner_R=r.plus(of.inner_R, inner_R),
            inner_parts_R=of.inner_parts_R + inner_R.value.abs(),
            dparameters=of.dparameters | {"bias": r.stored(dbias_D, of=largest_D, times=sharing.sums)},
        )

    return answer
