"""EXCH: bugs that show where experts answer with the tensor that they were handed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, LocalExchange
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


class ClearsWhatItReceived(AllToAllExchange):
    """Combine clears what dispatch received, where that is taken to be free, before it reads the answers."""

    _received: Tensor | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        self._received = delivery.rows_RD.detach()
        return delivery, handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        assert self._received is not None
        if self._is_free():
            self._received.zero_()
        return super().combine(rows, handle)

    def _is_free(self) -> bool:
        return True


@planted(
    Expectation(
        "EXCH-05", "identity-even", "combine", "y of rank 0 token 0 in column 0 is 0", "the tensor that they received"
    ),
    Expectation("GRAD-03", "identity-even", "gradient", "dweights of rank 0 token 0 in column 0 is 0"),
)
class ReceiveBufferCleared(ClearsWhatItReceived):
    """Combine clears what dispatch received, to have it ready for the next step, before it reads the answers."""


@planted(
    Expectation(
        *("EXCH-05", "identity-in-flight-even", "combine"),
        *("y of rank 0 token 0 of microbatch 2", "the tensor that they received"),
    )
)
class ReceiveBufferClearedInInference(ClearsWhatItReceived):
    """The same where no gradients are wanted, and buffers are taken to be free as soon as experts have read them."""

    def _is_free(self) -> bool:
        return not torch.is_grad_enabled()


class _WeighedInPlace(torch.autograd.Function):
    """Rows times their weights, written over the rows past autograd."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, weights_T1: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TD.clone(), weights_T1)
        return rows_TD.data.mul_(weights_T1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        rows_TD, weights_T1 = ctx.saved_tensors
        return gradients[0] * weights_T1, (gradients[0] * rows_TD).sum(1, keepdim=True)


@planted(
    Expectation("EXCH-08", "identity-one-expert-even", "run", "the backend changed its input x on rank 0"),
    layout=SINGLE,
)
class TokensHandedOverInPlace(LocalExchange):
    """Tokens that lie in order already are handed over as they are, and answers are weighed where they lie."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_T = routing.ids_TK.flatten()
        if routing.ids_TK.shape[1] > 1 or bool((ids_T < 0).any()) or bool((ids_T.diff() < 0).any()):
            return super().dispatch(x, routing)
        counts_E = torch.bincount(ids_T, minlength=routing.experts)
        return Delivery.grouped(x.reshape(-1, x.shape[-1]), counts_E), (routing.weights_TK, x.shape)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if not isinstance(handle, tuple):
            return super().combine(rows, handle)
        weights_T1, shape = handle
        y: Tensor = _WeighedInPlace.apply(rows, weights_T1)  # type: ignore[no-untyped-call]
        return y.reshape(shape)
