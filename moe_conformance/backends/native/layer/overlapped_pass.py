"""One microbatch on its way through one layer, in pieces between which its tokens are exchanged.

A pass is a generator. It stops where rows are under way, so that whoever drives it computes something else meanwhile.
Q rows that this rank sends, R rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.collectives import AsyncAllToAll
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.deferred import WeightGradients
from moe_conformance.backends.native.layer.layer import Layer

Pass = Generator[None, None, Tensor]


class Piece:
    """A part of a forward whose backward is run by itself; with `again` it keeps its inputs, and no graph."""

    def __init__(self, call: Callable[..., tuple[Tensor, ...]], *, again: bool = False) -> None:
        """Take what the piece computes."""
        self._call, self._again = call, again
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, cut from the graph."""
        self._inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        with torch.enable_grad():  # where it runs again, too: experts may compute otherwise without
            outputs = self._call(*self._inputs)
        self._outputs = () if self._again else outputs
        return tuple(tensor.detach() for tensor in outputs)

    def backward(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, given those of the outputs; None for what does not matter."""
        if self._again:
            with torch.enable_grad():
                self._outputs = self._call(*self._inputs)
        given = [pair for pair in zip(self._outputs, gradients, strict=True) if pair[1] is not None]
        torch.autograd.backward([output for output, _ in given], [gradient for _, gradient in given])
        found = tuple(tensor.grad for tensor in self._inputs)
        self._inputs = self._outputs = ()
        return found


class LayerPass:
    """The forward and the backward of one microbatch through one layer.

    Implements: OVLP-04, OVLP-05, OVLP-12, OVLP-14.
    """

    def __init__(self, layer: Layer, deferred: WeightGradients, *, again: bool) -> None:
        """Take the layer, where its weight gradients may be put off to, and whether its experts are recomputed."""
        assert isinstance(layer.exchange, AllToAllExchange)
        self.layer, self.exchange, self.deferred = layer, layer.exchange, deferred
        self.group = self.exchange.topology.group("ep")
        self.before, self.after = Piece(self._routed), Piece(self._finished)
        self.experts = Piece(self._answered, again=again)

    def forward(self, x_TD: Tensor) -> Pass:
        """Return y; it stops while rows are dispatched, and while they are combined."""
        rows_QD, weights_P, x_TD = self.before.forward(x_TD)
        rows_RD = yield from self._dispatched(rows_QD)
        (rows_RD,) = self.experts.forward(rows_RD)
        rows_QD = yield from self._combined(rows_RD)
        (y_TD,) = self.after.forward(rows_QD, weights_P, x_TD)
        return y_TD

    def backward(self, upstream_TD: Tensor) -> Pass:
        """Return dL/dx; it stops while gradients of rows are on their way.

        Weight gradients that were put off are computed while the last of them are.
        """
        rows_QD, weights_P, x_TD = self.after.backward(upstream_TD)
        rows_RD = yield from self._dispatched(_there(rows_QD))
        (gradient_RD,) = self.experts.backward(rows_RD)
        rows_QD = yield from self._combined(_there(gradient_RD), self.deferred.compute)
        (gradient_TD,) = self.before.backward(rows_QD, weights_P, x_TD)
        return _there(gradient_TD)

    def _dispatched(self, rows_QD: Tensor) -> Pass:
        return self._exchanged(rows_QD, self.plan.sent_C, self.plan.received_C)

    def _combined(self, rows_RD: Tensor, meanwhile: Callable[[], None] | None = None) -> Pass:
        return self._exchanged(rows_RD, self.plan.received_C, self.plan.sent_C, meanwhile)

    def _exchanged(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], meanwhile: Callable[[], None] | None = None
    ) -> Pass:
        """Return what arrives. It stops while the rows are under way, and `meanwhile` has been done."""
        exchange = AsyncAllToAll(sent, received, self.group) if self.group.size() > 1 else None
        if exchange is not None:
            exchange.start(rows)
        if meanwhile is not None:
            meanwhile()
        if exchange is None:
            return rows
        yield
        return exchange.wait()

    def _routed(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Route and permute, and agree on the splits. x is handed on last: its gradients add up as in a whole layer."""
        rows_QD, self.plan, self.permuted = self.exchange.planned(x_TD, self.layer.router(x_TD).routing)
        return rows_QD, self.permuted.weights_P, x_TD.view_as(x_TD)

    def _answered(self, rows_RD: Tensor) -> tuple[Tensor, ...]:
        delivery, handle = self.exchange.delivered(rows_RD, self.plan, self.permuted)
        return (self.exchange.leaving(self.layer.experts(delivery), handle.plan),)

    def _finished(self, rows_QD: Tensor, weights_P: Tensor, x_TD: Tensor) -> tuple[Tensor, ...]:
        y_TD = self.exchange.summed(rows_QD, replace(self.permuted, weights_P=weights_P))
        return (self.layer.finished(y_TD, x_TD),)


def _there(gradient: Tensor | None) -> Tensor:
    """Return a gradient that every pass has, for no rows too."""
    assert gradient is not None
    return gradient
