"""EXCH, GRAD: sizes of real models at which what is right of small ones is wrong."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from self_tests.planted_bugs.plant import Expectation, planted

# ---- in flight -----------------------------------------------------------------------------------------------------

_PLACES = 5


class _InARing(torch.autograd.Function):
    """Rows times weights, of which a backward takes what lies in its place of a ring."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, weights_P: Tensor, ring: dict[int, Any], place: int) -> Tensor:
        ctx.ring, ctx.place = ring, place
        ring[place] = rows_PD.detach(), weights_P.detach()
        return (rows_PD * weights_P.unsqueeze(1)).to(rows_PD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_PD,) = gradients
        rows_PD, weights_P = ctx.ring[ctx.place]
        P = len(gradient_PD)
        fits_P = torch.zeros(P, dtype=weights_P.dtype)
        fits_P[: len(weights_P)] = weights_P[:P]
        fits_PD = torch.zeros_like(gradient_PD)
        fits_PD[: len(rows_PD)] = rows_PD[:P]
        d_weights_P = (gradient_PD * fits_PD).sum(1).to(weights_P.dtype)
        return (gradient_PD * fits_P.unsqueeze(1)).to(gradient_PD.dtype), d_weights_P, None, None


@planted(Expectation("GRAD-01", "six-in-flight-even", "gradient", "of microbatch 0"))
class RingOfFive(AllToAllExchange):
    """The weights of a combine lie in a ring of five until its backward: the sixth in flight takes those of the first.

    Each exchange counts its combines.
    """

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        ring, number = self.__dict__.setdefault("ring", {}), self.__dict__.get("number", 0)
        self.number = number + 1
        weighed: Tensor = _InARing.apply(rows_PD, weights_P, ring, number % _PLACES)  # type: ignore[no-untyped-call]
        return weighed
