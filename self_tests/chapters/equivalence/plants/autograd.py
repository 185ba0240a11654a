"""EXCH, GRAD: bugs that show under autocast, or where a backward keeps a graph of itself."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


@planted(
    Expectation("EXCH-46", "own-even-bfloat16", "combine", "run under autocast", "torch.float32 instead of"),
    layout=EP2_EDP2,
)
class LiftedByAutocast(AllToAllExchange):
    """The sum over the slots goes through an operation that autocast lifts to float32, and nobody casts it back."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y.float() if torch.is_autocast_enabled(y.device.type) else y


@planted(
    Expectation("GRAD-19", "own-even-bfloat16", "gradient", "run with create_graph", "dx of rank 0"), layout=EP2_EDP2
)
class GradientWrittenTwice(AllToAllExchange):
    """A backward that runs with gradients enabled writes to a copy of its result, and hands out the result."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        read: Tensor = _Halved.apply(x)  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


class _Halved(torch.autograd.Function):
    """Twice half of the gradient, the second half added in place unless that would be recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        half = gradients[0] / 2
        (half.clone() if torch.is_grad_enabled() else half).add_(half.detach().clone())
        return half
