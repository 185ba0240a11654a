"""GRAD-15: bugs of exchanges whose tokens or weights ask for no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.fused.managers import DeepEPManager
from moe_conformance.backends.native.fused.surface import ReusableExchange
from moe_conformance.backends.native.fused.token_exchange import Handle
from moe_conformance.backends.native.layer.batched_experts import batched
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.contract import Delivery, Received
from self_tests.planted_bugs.plant import Expectation, planted


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def lost_gradient(value: Tensor) -> Tensor:
    """Return the value, whose gradient goes no further."""
    lost: Tensor = _GivesNone.apply(value)  # type: ignore[no-untyped-call]
    return lost


@planted(
    Expectation(
        "GRAD-15", "unasked-x-even", "gradient", "the gradient of the weights on rank 0 in microbatch 0 is None"
    )
)
class WeightsGoBackWithTokens(DeepEPManager):
    """The backward of dispatch returns early where tokens ask for no gradient; that of the weights goes with it."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, weights_TK if x_TD.requires_grad else lost_gradient(weights_TK))


@planted(
    Expectation(
        *("GRAD-15", "weights-asked-apart", "gradient"),
        *("of weights_TK of dispatch (call 0) through combine", "is None on rank 0"),
    )
)
class SentWeightsGoBackWithTokens(ReusableExchange):
    """As on the surface of the token exchange."""

    def dispatch(
        self, x_TD: Tensor, ids_TK: Tensor | None = None, weights_TK: Tensor | None = None, handle: Handle | None = None
    ) -> Received:
        if weights_TK is not None and not x_TD.requires_grad:
            weights_TK = lost_gradient(weights_TK)
        return super().dispatch(x_TD, ids_TK, weights_TK, handle)


@planted(
    Expectation("GRAD-15", "unasked-weights-even", "gradient", "the gradient of x on rank 0 in microbatch 0 is None")
)
class TokensGoBackWithWeights(DeepEPManager):
    """The backward of dispatch returns early where weights ask for no gradient; that of the tokens goes with it."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD if weights_TK.requires_grad else lost_gradient(x_TD), ids_TK, weights_TK)


@planted(Expectation("GRAD-15", "own-unasked-x-equal", "gradient", "every expert gradient is zero"))
class ShortcutWhereRowsAskForNone(Experts):
    """The products for forwards without gradients, whose weights are detached, are taken wherever rows ask for none."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if len(set(counts_N)) > 1 or rows_PD.requires_grad:
            return super()._run(rows_PD, counts_N)
        return batched(rows_PD, self.derived.of(self.gate_NFD, self.up_NFD, self.down_NDF))
