"""GRAD: bugs that show where a gradient is differentiated once more; the first derivatives are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


class _Detached(torch.autograd.Function):
    """The identity, whose backward is computed on data without a graph, as a kernel computes it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        with torch.no_grad():
            return gradients[0].clone()


class _Once(torch.autograd.Function):
    """The identity, which refuses a second backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


class _Weigh(torch.autograd.Function):
    """Rows times weights; the backward takes the weights as constants."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        ctx.save_for_backward(rows_PD, weights_P)
        return (rows_PD * weights_P[:, None]).to(rows_PD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        rows_PD, weights_P = ctx.saved_tensors
        gradient_PD = (gradients[0] * weights_P.detach()[:, None]).to(rows_PD.dtype)
        return gradient_PD, (gradients[0] * rows_PD).sum(1).to(weights_P.dtype)


_WORDS = "run with a second backward"


@planted(
    Expectation("GRAD-20", "even", "gradient", _WORDS, "by the upstream gradient of rank 0 is None", "not recorded"),
    Expectation("GRAD-20", "own-even-bfloat16", "gradient", _WORDS, "is None, which asks for no gradient"),
    real="pytorch/pytorch PR #160509 (issue #160313)",
)
class BackwardOutsideTheGraph(AllToAllExchange):
    """The backward of dispatch is computed without gradients, so that the gradient of tokens is a constant."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        read: Tensor = _Detached.apply(x)  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


@planted(Expectation("GRAD-20", "even", "gradient", _WORDS, "by the routing weights of rank 0 is None"))
class WeightsAreConstantsInTheBackward(AllToAllExchange):
    """The backward of the weighting multiplies with saved numbers, not with the weights."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        weighted: Tensor = _Weigh.apply(rows_PD, weights_P)  # type: ignore[no-untyped-call]
        return weighted


@planted(Expectation("GRAD-20", "even", "gradient", _WORDS, "by the upstream gradient of rank 0 is", "instead of"))
class SecondBackwardOfTheOtherSign(AllToAllExchange):
    """The backward of dispatch has a backward of its own, which is wrong by its sign."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        read: Tensor = _Negated.apply(x, True)  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


class _Negated(torch.autograd.Function):
    """The identity, whose backward is one too and whose second backward is not."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.first:
            return _Negated.apply(gradients[0], False), None  # type: ignore[no-untyped-call]
        return -gradients[0], None


@planted(
    Expectation("GRAD-20", "even", "run", _WORDS, "rank 0 hung", "likely cause: another rank raised"),
)
class RefusedOnOddRanks(AllToAllExchange):
    """Odd ranks refuse a second backward of their dispatch, and the others wait for them in the collective."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        refuses = self.topology.rank % 2 == 1
        read: Tensor = _Once.apply(x) if refuses else x  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)


@planted(
    Expectation("GRAD-20", "even", "run", "no token on the last rank", "rank 2 hung", "is not recorded"),
    layout=EP2_EDP2,
)
class NoSecondBackwardWithoutTokens(AllToAllExchange):
    """A rank without tokens has a gradient that is not in the graph, and leaves the others waiting."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        read: Tensor = x if len(x) else _Detached.apply(x)  # type: ignore[no-untyped-call]
        return super().dispatch(read, routing)
