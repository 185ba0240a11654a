"""Magnitudes of experts: how large the rounding errors of what experts make of their rows may be.

N experts are measured at once. Each has R rows, those that it lacks filled up with zeros: their results are dropped,
they add nothing to a gradient, and `Routed.counts_N` keeps them out of the count of its addends.

SwiGLU and its derivative in the measured numbers of `rounding.py`. The derivative is written out by hand, as
autograd carries no errors; that its values are those of autograd is checked in `magnitudes.py`.

Source: the chain rule; SwiGLU as in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.experts import Parameters
from moe_conformance.reference.rounding.errors import Measured, Rounding, exact, multiplication, partial, parts_of


class Sharing(NamedTuple):
    """How the work may be shared out, so that sums are made of parts that are stored."""

    etp: int = 1  # parts of an expert's hidden columns
    places: Sequence[int] = ()  # how many tokens, in order, a rank has at a time; () for all of them
    sums: int = 0  # roundings of a parameter's gradient: of its parts by place, and of sums of these


class Routed(NamedTuple):
    """Whose rows are measured: those of N experts, in the order of tokens, then padding."""

    experts: Sequence[int]  # N global ids
    counts_N: Tensor  # int64, how many rows are no padding
    places_NR: Tensor  # int64, the place of every row (see `Sharing`)

    def sum_of_rows(self, r: Rounding, formula: str, a: Measured, b: Measured, sharing: Sharing) -> Measured:
        """Sum products over the rows r of each expert n, n first in the result: the parts by place may be stored."""
        multiply, result = multiplication(formula), formula.split("->")[1]
        whole = r.products(formula, a, b, self.counts_N.reshape(-1, *[1] * (len(result) - 1)))
        parts = torch.zeros_like(whole.value)
        for place in range(max(len(sharing.places), 1)):
            here_NR = self.places_NR == place
            parts += multiply(
                torch.where(here_NR if a.value.ndim == 2 else here_NR[..., None], a.value, 0.0), b.value
            ).abs()
        return r.stored(whole, of=partial(whole.value, parts), times=sharing.sums)


class MeasuredRows(NamedTuple):
    """What N experts make of R rows each, out = f(rows), and the gradients of weight * out.

    "Parts" are the sums of the absolute parts that may have been added up, as every etp rank makes one.
    """

    out_NRD: Measured
    out_parts_NRD: Tensor
    drows_NRD: Measured
    drows_parts_NRD: Tensor
    inner_NR: Measured  # <dL/dy, out>, summed over the hidden columns inside the expert
    inner_parts_NR: Tensor
    dparameters: dict[str, Measured]  # (N, ...) each


class MeasuredExperts(NamedTuple):
    """Experts, which are measured together where they have as many hidden columns."""

    measure: Callable[[Measured, Measured, Measured, Routed], MeasuredRows]
    """(rows (N, R, D), weights (N, R), dL/dy (N, R, D), whose rows they are) -> what they make of them"""
    columns: Mapping[int, int]  # hidden columns, F, by expert id


def swiglu_measured(r: Rounding, parameters: Parameters, sharing: Sharing) -> MeasuredExperts:
    """Make the measured twin of `experts.swiglu_experts`.

    >>> from moe_conformance.reference.experts import swiglu
    >>> p = [torch.arange(8.0).sin().double().reshape(size) for size in ((4, 2), (4, 2), (2, 4))]
    >>> x, dy, w = (torch.arange(n).cos().double().reshape(5, -1) for n in (10.0, 10.0, 5.0))
    >>> experts = swiglu_measured(Rounding(1.0, 1.0), dict(zip([("gate", 7), ("up", 7), ("down", 7)], p)), Sharing())
    >>> routed = Routed([7], torch.tensor([5]), torch.zeros(1, 5))
    >>> of = experts.measure(exact(x[None]), exact(w.flatten()[None]), exact(dy[None]), routed)
    >>> leaves = [leaf.requires_grad_() for leaf in (x.clone(), *p)]
    >>> out = swiglu(*leaves)
    >>> expected = [out, (out * dy).sum(1), *torch.autograd.grad(out, leaves, w * dy)]
    >>> found = [of.out_NRD, of.inner_NR, of.drows_NRD, *of.dparameters.values()]
    >>> [torch.allclose(measured.value[0], value) for measured, value in zip(found, expected)]
    [True, True, True, True, True, True]
    """

    def measure(x_NRD: Measured, w_NR: Measured, dy_NRD: Measured, routed: Routed) -> MeasuredRows:
        gate_NFD, up_NFD, down_NDF = (
            exact(torch.stack([parameters[name, e] for e in routed.experts])) for name in ("gate", "up", "down")
        )
        z_NRF = r.products("nrd,nfd->nrf", x_NRD, gate_NFD)
        up_NRF = r.products("nrd,nfd->nrf", x_NRD, up_NFD)
        silu_NRF = r.silu(z_NRF)
        hidden_NRF = r.stored(
            r.products("nrf,nrf->nrf", silu_NRF, up_NRF)
        )  # once more where the weight multiplies here
        out_NRD = r.products("nrf,ndf->nrd", hidden_NRF, down_NDF)

        inner_NRF = r.products("nrd,ndf->nrf", dy_NRD, down_NDF)
        dhidden_NRF = r.products("nr,nrf->nrf", w_NR, inner_NRF)
        dup_NRF = r.products("nrf,nrf->nrf", dhidden_NRF, silu_NRF)
        dsilu_NRF = r.products("nrf,nrf->nrf", dhidden_NRF, up_NRF)
        dz_NRF = r.products("nrf,nrf->nrf", dsilu_NRF, r.silu_slope(z_NRF))
        by_gate_NRD = r.products("nrf,nfd->nrd", dz_NRF, gate_NFD)
        by_up_NRD = r.products("nrf,nfd->nrd", dup_NRF, up_NFD)
        weighted_dy_NRD = r.products("nr,nrd->nrd", w_NR, dy_NRD)

        columns = [len(part) for part in torch.arange(down_NDF.value.shape[2]).tensor_split(sharing.etp)]
        return MeasuredRows(
            out_NRD,
            parts_of("nrf,ndf->nrd", hidden_NRF, down_NDF, "f", columns),
            r.plus(by_gate_NRD, by_up_NRD),
            parts_of("nrf,nfd->nrd", dz_NRF, gate_NFD, "f", columns)
            + parts_of("nrf,nfd->nrd", dup_NRF, up_NFD, "f", columns),
            r.products("nrf,nrf->nr", inner_NRF, hidden_NRF),
            parts_of("nrf,nrf->nr", inner_NRF, hidden_NRF, "f", columns),
            {
                "gate": routed.sum_of_rows(r, "nrf,nrd->nfd", dz_NRF, x_NRD, sharing),
                "up": routed.sum_of_rows(r, "nrf,nrd->nfd", dup_NRF, x_NRD, sharing),
                "down": routed.sum_of_rows(r, "nrd,nrf->ndf", weighted_dy_NRD, hidden_NRF, sharing),
            },
        )

    return MeasuredExperts(measure, {e: len(value) for (name, e), value in parameters.items() if name == "gate"})


def biased(r: Rounding, experts: MeasuredExperts, biases: Mapping[int, Tensor], sharing: Sharing) -> MeasuredExperts:
    """Add an output bias to the answers of every expert, (D,) by expert id, and measure its gradient.

    The bias is added to the sum of the parts, or is one part more. Without any bias the experts stay as they are.

    >>> def silent(x, w, dy, routed):
    ...     zero_NRD, zero_NR = exact(torch.zeros_like(x.value)), exact(torch.zeros_like(w.value))
    ...     return MeasuredRows(zero_NRD, zero_NRD.value, zero_NRD, zero_NRD.value, zero_NR, zero_NR.value, {})
    >>> rows, w, dy = (exact(torch.tensor([each])) for each in ([[1.0], [1.0]], [0.5, 0.25], [[3.0], [-4.0]]))
    >>> experts = biased(Rounding(0.5, 0.0), MeasuredExperts(silent, {7: 1}), {7: torch.tensor([6.0])}, Sharing())
    >>> of = experts.measure(rows, w, dy, Routed([7], torch.tensor([2]), torch.zeros(1, 2)))
    >>> of.out_NRD.value.tolist(), of.out_NRD.worst.tolist(), of.inner_NR.value.tolist()
    ([[[6.0], [6.0]]], [[[3.0], [3.0]]], [[18.0, -24.0]])
    >>> of.dparameters["bias"].value.tolist()  # 0.5 3 - 0.25 4
    [[0.5]]
    """

    def measure(x_NRD: Measured, w_NR: Measured, dy_NRD: Measured, routed: Routed) -> MeasuredRows:
        of = experts.measure(x_NRD, w_NR, dy_NRD, routed)
        bias_ND = exact(torch.stack([biases[e] for e in routed.experts]))
        bias_NRD = bias_ND.map(lambda each: each[:, None].expand_as(of.out_NRD.value))
        inner_NR = r.products("nrd,nd->nr", dy_NRD, bias_ND)
        return of._replace(
            out_NRD=r.plus(of.out_NRD, bias_NRD),
            out_parts_NRD=of.out_parts_NRD + bias_NRD.value.abs(),
            inner_NR=r.plus(of.inner_NR, inner_NR),
            inner_parts_NR=of.inner_parts_NR + inner_NR.value.abs(),
            dparameters=of.dparameters | {"bias": routed.sum_of_rows(r, "nr,nrd->nd", w_NR, dy_NRD, sharing)},
        )

    return experts._replace(measure=measure) if biases else experts
