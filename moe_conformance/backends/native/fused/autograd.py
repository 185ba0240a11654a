"""A fused token exchange under autograd: the backward of each half is the other half, with the same handle.

The gradient of a token is the sum over the rows that were sent of it, which is what combine computes; the gradient of
a row that was added to its token is that token's, which is what dispatch sends. Weights that were sent with the rows
have their gradients sent back with those of the rows. No backward exchanges a number of rows or an id. Where rows are
rounded for dispatch, their gradient is that of what was sent, and gradients are sent unrounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.fused.token_exchange import Arrived, Handle, TokenExchange


class _Dispatch(torch.autograd.Function):
    """Tokens and weights to the ranks of their experts; the gradients of both are sent back by combine."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        ids_TK: Tensor | None,
        exchange: TokenExchange,
        handle: Handle | None,
    ) -> tuple[Tensor, Tensor | None, Handle, Tensor | None]:
        """Dispatch and keep the handle."""
        arrived = exchange.dispatch(x_TD, ids_TK, weights_TK, handle)
        ctx.exchange, ctx.handle = exchange, arrived.handle
        if arrived.scales_RB is not None:
            ctx.mark_non_differentiable(arrived.scales_RB)
        return arrived.rows_RD, arrived.weights_RK, arrived.handle, arrived.scales_RB

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Combine the gradients of the rows and of their weights, whichever of the two are wanted.

        Implements: GRAD-02, GRAD-15.
        """
        rows_RD, weights_RK, *_ = gradients
        return *ctx.exchange.combine(rows_RD, ctx.handle, weights_RK), None, None, None


class _Combine(torch.autograd.Function):
    """Rows back to their tokens; the gradient of each token is sent to all ranks of its rows by dispatch."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, exchange: TokenExchange, handle: Handle) -> Tensor:
        """Combine and keep the handle."""
        ctx.exchange, ctx.handle = exchange, handle
        return exchange.combine(rows_RD, handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Dispatch the gradients of the tokens over the layout that is known.

        Implements: GRAD-01.
        """
        return ctx.exchange.dispatch(gradients[0], handle=ctx.handle, plain=True).rows_RD, None, None


def dispatch(
    exchange: TokenExchange,
    x_TD: Tensor,
    ids_TK: Tensor | None = None,
    weights_TK: Tensor | None = None,
    handle: Handle | None = None,
) -> Arrived:
    """Return what reached this rank, differentiable in the tokens and in the weights; see `TokenExchange.dispatch`."""
    found = _Dispatch.apply(x_TD, weights_TK, ids_TK, exchange, handle)  # type: ignore[no-untyped-call]
    return Arrived(*found)


def combine(exchange: TokenExchange, rows_RD: Tensor, handle: Handle) -> Tensor:
    """Return the sums by token, differentiable in the rows."""
    y_TD: Tensor = _Combine.apply(rows_RD, exchange, handle)  # type: ignore[no-untyped-call]
    return y_TD
