"""EXCH-30: bugs in what a token exchange rounds to eight bits, and one that claims to round its gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.fused.surface import ReusableExchange
from moe_conformance.backends.native.fused.token_exchange import Arrived, Handle, TokenExchange
from moe_conformance.contract import Claims
from self_tests.planted_bugs.plant import Expectation, planted


@planted(Expectation("EXCH-30", "float8-rows", "dispatch", "the scale of block 1 is", "; expected "))
class LargestRoundedFirst(Float8Wire):
    """Scales are those of the largest elements rounded to e4m3: just above the largest number they are too small."""

    def _scales(self, rows_RD: Tensor) -> Tensor:
        mantissa_RD, exponent_RD = torch.frexp(rows_RD)
        return super()._scales(torch.ldexp((16 * mantissa_RD).round() / 16, exponent_RD))


class RoundsGradients(TokenExchange):
    """The backward of combine dispatches gradients in eight bits, as the forward did the rows."""

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
        plain: bool = False,
    ) -> Arrived:
        return super().dispatch(x_TD, ids_TK, weights_TK, handle)


@planted(
    Expectation(
        *("EXCH-30", "float8-rows", "gradient", "the gradient of rank 0 token"),
        "; a backend that quantises gradients by design claims gradient_format = 'e4m3'",
    )
)
class RoundsGradientsUnsaid(RoundsGradients):
    """Gradients are sent in eight bits, which nothing claims."""


class SaysGradientFormat(ReusableExchange):
    """Claims the format in which gradients are sent."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, gradient_format="e4m3")


class RoundedGradients(Native):
    """Native, which sends gradients in eight bits and says so."""

    session_class = NativeSession.building(SaysGradientFormat, RoundsGradients)
