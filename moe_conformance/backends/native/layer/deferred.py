"""Weight gradients that are put off: the backward computes gradients of inputs alone, and notes what is left to do.

R rows, O outputs, D inputs of a linear map; N experts in a stacked parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Linear = Callable[[Tensor, Any], Tensor]  # rows (R, D) and a weight (O, D), a tensor or `Put`, to (R, O)


class Put(NamedTuple):
    """A weight (O, D) whose gradient is put off: a parameter, or the part of expert n of a stacked one (N, O, D)."""

    parameter: nn.Parameter
    n: int | None = None

    @property
    def weight_OD(self) -> Tensor:
        """Its values, of which autograd knows nothing."""
        whole = self.parameter.detach()
        return whole if self.n is None else whole[self.n]


class _Product(NamedTuple):
    """What is left to do for a weight: upstream transposed, times rows."""

    weight: Put
    rows_RD: Tensor
    upstream_RO: Tensor


class _Deferred(torch.autograd.Function):
    """A linear map whose backward returns the gradient of the rows, and notes the product for the weight."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weight: Put, gradients: WeightGradients) -> Tensor:
        ctx.weight, ctx.gradients = weight, gradients
        ctx.save_for_backward(rows_RD)
        return F.linear(rows_RD, weight.weight_OD)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (rows_RD,) = ctx.saved_tensors
        ctx.gradients.note(ctx.weight, rows_RD, upstream[0])
        return upstream[0].mm(ctx.weight.weight_OD), None, None


class WeightGradients:
    """The weight gradients of one layer that a backward has left for later.

    Implements: OVLP-07, OVLP-10.
    """

    def __init__(self) -> None:
        """Nothing is left to do."""
        self.pending: list[_Product] = []

    def linear(self, rows_RD: Tensor, weight: Put) -> Tensor:
        """Return the rows times the weight, (R, O)."""
        result: Tensor = _Deferred.apply(rows_RD, weight, self)  # type: ignore[no-untyped-call]
        return result

    def note(self, weight: Put, rows_RD: Tensor, upstream_RO: Tensor) -> None:
        """Leave a product for later, with the values of this pass."""
        self.pending.append(_Product(weight, rows_RD, upstream_RO))

    def compute(self) -> None:
        """Compute what is left, weight by weight as the backward reached them, and add it to the gradients.

        Products of one weight are summed first, in the order in which autograd sums them.

        Implements: OVLP-06.
        """
        sums: dict[nn.Parameter, dict[int | None, Tensor]] = {}
        for weight, rows_RD, upstream_RO in self.pending:
            found, product_OD = sums.setdefault(weight.parameter, {}), upstream_RO.t().mm(rows_RD)
            found[weight.n] = product_OD if weight.n not in found else found[weight.n] + product_OD
        self.pending = []
        for parameter, parts in sums.items():
            stacked = [parts[n] for n in range(len(parameter))] if None not in parts else []
            self._add(parameter, torch.stack(stacked) if stacked else parts[None])

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient that is there.

        Implements: OVLP-08.
        """
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.grad_dtype)
        else:
            parameter.grad.add_(gradient)
