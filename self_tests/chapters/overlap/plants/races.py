"""OVLP-11 and SHARE: rows and gradients that are used before they have come, each on another way of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.collectives import AsyncAllToAll
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Departed
from moe_conformance.backends.native.layer.overlapped_pass import LayerPass, Pass
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import Expectation, planted

EARLY = "likely cause: the output of an asynchronous collective was read before wait()"


class _Early(LayerPass):
    """Takes a copy of what has come, and waits behind it, where it is told to."""

    def _taken(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], meanwhile: Callable[[], None] | None = None
    ) -> Pass:
        exchange = AsyncAllToAll(sent, received, self.group)
        exchange.start(rows)
        if meanwhile is not None:
            meanwhile()
        yield
        early = exchange.result.clone()
        exchange.wait()
        return early


@planted(Expectation("OVLP-11", "overlap-delayed-uneven", "combine", "of microbatch 0 on rank 0", EARLY))
class DispatchNotAwaited(_Early):
    """The experts take their rows as soon as the other microbatch has had its turn."""

    def _dispatched(self, rows_QD: Tensor) -> Pass:
        return self._taken(rows_QD, self.plan.sent_C, self.plan.received_C)


@planted(Expectation("OVLP-11", "overlap-delayed-uneven", "combine", "of microbatch 0 on rank 0", EARLY))
class StepCombineNotAwaited(_Early):
    """Outputs are summed as soon as the other microbatch has had its turn."""

    def _combined(self, rows_RD: Tensor, meanwhile: Callable[[], None] | None = None) -> Pass:
        if meanwhile is not None:  # in the backward
            return super()._combined(rows_RD, meanwhile)
        return self._taken(rows_RD, self.plan.received_C, self.plan.sent_C)


@planted(Expectation("OVLP-11", "overlap-delayed-uneven", "gradient", "dL/dx of microbatch 0 on rank 0", EARLY))
class StepOutputGradientsNotAwaited(_Early):
    """The backward of the experts takes its gradients as soon as the other microbatch has had its turn."""

    def backward(self, upstream_TD: Tensor) -> Pass:
        self.going_back = True
        return super().backward(upstream_TD)

    def _dispatched(self, rows_QD: Tensor) -> Pass:
        if not hasattr(self, "going_back"):
            return super()._dispatched(rows_QD)
        return self._taken(rows_QD, self.plan.sent_C, self.plan.received_C)


@planted(Expectation("OVLP-11", "overlap-delayed-uneven", "gradient", "dL/dx of microbatch 0 on rank 0", EARLY))
class StepGradientsNotAwaited(_Early):
    """The gradients of rows that come back are used as soon as weight gradients have been computed."""

    def _combined(self, rows_RD: Tensor, meanwhile: Callable[[], None] | None = None) -> Pass:
        if meanwhile is None:  # in the forward
            return super()._combined(rows_RD)
        return self._taken(rows_RD, self.plan.received_C, self.plan.sent_C, meanwhile)


class _EarlyBack(AsyncAllToAll):
    """Takes a copy of the gradients that have come, and waits behind it."""

    going_back = False

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        self.going_back = back
        return super().start(rows, back=back)

    def wait(self) -> Tensor:
        if not self.going_back:
            return super().wait()
        early = self.result.clone()
        super().wait()
        return early


@planted(Expectation("SHARE-07", "shared-beside-poisoned-uneven", "gradient", "dx of rank 0 token 0 is nan", EARLY))
class GradientsOfRowsNotAwaited(AllToAllExchange):
    """In the backward the gradients of rows are used when that of the shared experts is there."""

    def depart(self, x: Tensor, routing: Routing) -> Departed:
        rows_QD, plan, permuted = self.planned(x, routing)
        exchange = _EarlyBack(plan.sent_C, plan.received_C, self.topology.group("ep"))
        rows = collectives._Depart.apply(rows_QD, exchange)  # type: ignore[no-untyped-call]
        return Departed(rows, exchange, plan, permuted)
