"""Magnitudes of experts: how large the rounding errors of what experts make of their rows may be.

N experts are measured at once. Each has R rows, those that it lacks filled up with zeros: their results are dropped,
they add nothing to a gradient, and `Routed.counts_N` keeps them out of the count of its addends.

SwiGLU, or experts with another function and biases, and their derivatives in the measured numbers of `errors.py`. The
derivatives are written out by hand, as autograd carries no errors; that their values are those of autograd is checked
here.

Source: the chain rule; experts as in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.reference.experts import Function, Parameters
from moe_conformance.reference.rounding.activations import cut, limited, value_and_slope
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
    return function_measured(Function())(r, parameters, sharing)


def function_measured(function: Function) -> Callable[[Rounding, Parameters, Sharing], MeasuredExperts]:
    """Make the measured twin of `experts.function_experts`, with the biases that there are.

    Where a limit cuts, results on one side of it are told: a backend's may lie on the other if they are that near.

    >>> from moe_conformance.reference.experts import function_experts
    >>> sizes = {"gate": (4, 2), "up": (4, 2), "down": (2, 4), "bias_gate": (4,), "bias_up": (4,), "bias": (2,)}
    >>> p = {(name, 7): torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    >>> x, dy, w = (torch.arange(n).cos().double().reshape(5, -1) for n in (10.0, 10.0, 5.0))
    >>> function = Function(limit=0.5, slope=1.7, offset=1.0)
    >>> experts = function_measured(function)(Rounding(1.0, 1.0), p, Sharing())
    >>> routed = Routed([7], torch.tensor([5]), torch.zeros(1, 5))
    >>> of = experts.measure(exact(x[None]), exact(w.flatten()[None]), exact(dy[None]), routed)
    >>> leaves = {key: value.requires_grad_() for key, value in (p | {"x": x.clone()}).items()}
    >>> out = function_experts(function)(leaves)(leaves["x"], 7)
    >>> expected = torch.autograd.grad(out, [leaves["x"], *(leaves[name, 7] for name in sizes)], w * dy)
    >>> found = [of.drows_NRD, *(of.dparameters[name] for name in sizes)]
    >>> assert torch.allclose(out, of.out_NRD.value[0])
    >>> [torch.allclose(measured.value[0], value) for measured, value in zip(found, expected)]
    [True, True, True, True, True, True, True]
    """

    def build(r: Rounding, parameters: Parameters, sharing: Sharing) -> MeasuredExperts:
        def measure(x_NRD: Measured, w_NR: Measured, dy_NRD: Measured, routed: Routed) -> MeasuredRows:
            return _FunctionOfRows(r, parameters, sharing, function, routed).measured(x_NRD, w_NR, dy_NRD)

        columns = {e: len(value) for (name, e), value in parameters.items() if name == "up"}
        biases = {e: value for (name, e), value in parameters.items() if name == "bias"}
        return biased(r, MeasuredExperts(measure, columns), biases, sharing, times=1)

    return build


class _FunctionOfRows(NamedTuple):
    """N experts, some of their parameters, and whose rows they see."""

    r: Rounding
    parameters: Parameters
    sharing: Sharing
    function: Function
    routed: Routed

    def measured(self, x_NRD: Measured, w_NR: Measured, dy_NRD: Measured) -> MeasuredRows:
        """Run the experts without their output bias, forward and backward."""
        r, routed, sharing, down_NDF = self.r, self.routed, self.sharing, self._stacked("down")
        assert down_NDF is not None
        projections = {"gate": self._stacked("gate"), "up": self._stacked("up")}
        there = {name: matrix for name, matrix in projections.items() if matrix is not None}
        hidden_NRF, slopes = self._hidden({name: self._projected(name, each, x_NRD) for name, each in there.items()})
        out_NRD = r.products("nrf,ndf->nrd", hidden_NRF, down_NDF)

        inner_NRF = r.products("nrd,ndf->nrf", dy_NRD, down_NDF)
        dhidden_NRF = r.products("nr,nrf->nrf", w_NR, inner_NRF)
        dz = {name: self._backward(dhidden_NRF, slopes[name]) for name in there}
        weighted_dy_NRD = r.products("nr,nrd->nrd", w_NR, dy_NRD)
        columns = [len(part) for part in torch.arange(down_NDF.value.shape[2]).tensor_split(sharing.etp)]
        by = [(dz[name], matrix) for name, matrix in there.items()]
        drows = [r.products("nrf,nfd->nrd", each, matrix) for each, matrix in by]
        one_NR = exact(torch.ones_like(w_NR.value))
        biases = {name: dz[name] for name in there if f"bias_{name}" in {key for key, _ in self.parameters}}
        return MeasuredRows(
            out_NRD,
            parts_of("nrf,ndf->nrd", hidden_NRF, down_NDF, "f", columns),
            drows[0] if len(drows) == 1 else r.plus(*drows),
            sum((parts_of("nrf,nfd->nrd", *each, "f", columns) for each in by), torch.zeros_like(out_NRD.value)),
            r.products("nrf,nrf->nr", inner_NRF, hidden_NRF),
            parts_of("nrf,nrf->nr", inner_NRF, hidden_NRF, "f", columns),
            {
                **{name: routed.sum_of_rows(r, "nrf,nrd->nfd", each, x_NRD, sharing) for name, each in dz.items()},
                "down": routed.sum_of_rows(r, "nrd,nrf->ndf", weighted_dy_NRD, hidden_NRF, sharing),
                **{
                    f"bias_{name}": routed.sum_of_rows(r, "nr,nrf->nf", one_NR, each, sharing)
                    for name, each in biases.items()
                },
            },
        )

    def _stacked(self, name: str) -> Measured | None:
        """Return a parameter of the N experts, if they have it."""
        if (name, self.routed.experts[0]) not in self.parameters:
            return None
        return exact(torch.stack([self.parameters[name, e] for e in self.routed.experts]))

    def _projected(self, name: str, matrix_NFD: Measured, x_NRD: Measured) -> Measured:
        z_NRF, bias_NF = self.r.products("nrd,nfd->nrf", x_NRD, matrix_NFD), self._stacked(f"bias_{name}")
        if bias_NF is None:
            return z_NRF
        return self.r.plus(z_NRF, bias_NF.map(lambda each: each[:, None].expand_as(z_NRF.value)))

    def _hidden(self, z: dict[str, Measured]) -> tuple[Measured, dict[str, list[Measured | Tensor]]]:
        """Return what the down projection gets, and the factors of its derivative by each of its arguments."""
        r, function = self.r, self.function
        if "gate" not in z:
            value_NRF, slope_NRF = value_and_slope(r, z["up"], function.activation, function.slope)
            return r.stored(value_NRF), {"up": [slope_NRF]}
        gate_NRF, up_NRF, kept = z["gate"], z["up"], dict[str, list[Measured | Tensor]](gate=[], up=[])
        if function.limit is not None:
            gate_NRF, inside_NRF = limited(gate_NRF, -torch.inf, function.limit)
            kept["gate"] = [inside_NRF]
            up_NRF, inside_NRF = limited(up_NRF, -function.limit, function.limit)
            kept["up"] = [inside_NRF]
        if function.offset:
            up_NRF = r.plus(up_NRF, exact(torch.full_like(up_NRF.value, function.offset)))
        value_NRF, slope_NRF = value_and_slope(r, gate_NRF, function.activation, function.slope)
        hidden_NRF = r.stored(r.products("nrf,nrf->nrf", value_NRF, up_NRF))  # once more where the weight multiplies
        return hidden_NRF, {"gate": [up_NRF, slope_NRF, *kept["gate"]], "up": [value_NRF, *kept["up"]]}

    def _backward(self, dhidden_NRF: Measured, factors: Sequence[Measured | Tensor]) -> Measured:
        for factor in factors:
            if isinstance(factor, Tensor):
                dhidden_NRF = cut(dhidden_NRF, factor)
            else:
                dhidden_NRF = self.r.products("nrf,nrf->nrf", dhidden_NRF, factor)
        return dhidden_NRF


def biased(
    r: Rounding, experts: MeasuredExperts, biases: Mapping[int, Tensor], sharing: Sharing, *, times: int = 0
) -> MeasuredExperts:
    """Add an output bias to the answers of every expert, (D,) by expert id, and measure its gradient.

    The bias is added to the sum of the parts, or is one part more. It is stored so many times before: once where it is
    multiplied by the routing weight alone. Without any bias the experts stay as they are.

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
        bias_NRD = r.stored(bias_ND, times=times).map(lambda each: each[:, None].expand_as(of.out_NRD.value))
        inner_NR = r.products("nrd,nd->nr", dy_NRD, bias_ND)
        return of._replace(
            out_NRD=r.plus(of.out_NRD, bias_NRD),
            out_parts_NRD=of.out_parts_NRD + bias_NRD.value.abs(),
            inner_NR=r.plus(of.inner_NR, inner_NR),
            inner_parts_NR=of.inner_parts_NR + inner_NR.value.abs(),
            dparameters=of.dparameters | {"bias": routed.sum_of_rows(r, "nr,nrd->nd", w_NR, dy_NRD, sharing)},
        )

    return experts._replace(measure=measure) if biases else experts
