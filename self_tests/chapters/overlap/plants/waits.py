"""OVLP-03: handles that nobody waits for, on each way of an exchange. Most values come in time and are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.collectives import AsyncAllToAll
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Departed, Plan
from moe_conformance.backends.native.layer.overlapped_pass import LayerPass, Pass
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import Expectation, planted

NEVER = "all_to_all_single on group (0, 1)", "was never waited for"
SOON = 0.02  # seconds by when rows have nearly always come


class _Abandoned(AsyncAllToAll):
    """Returns what it received without a wait."""

    def wait(self) -> Tensor:
        time.sleep(SOON)
        result, self._under_way = self.result, None
        return result


class _Abandoning(AllToAllExchange):
    def _sent(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        exchange = _Abandoned(sent, received, self.topology.group("ep"))
        return collectives.arrive(collectives._Depart.apply(rows, exchange), exchange)  # type: ignore[no-untyped-call]


@planted(
    Expectation("OVLP-03", "even", "run", *NEVER),
    Expectation("EXCH-02", "poisoned-even", "dispatch", "row 0", "is not finite", "likely cause", *NEVER),
)
class RowsNeverAwaited(_Abandoning):
    """Rows are handed to the experts behind a call that returns at once, in the belief that it blocks."""

    def _send(self, rows_QD: Tensor, plan: Plan) -> Tensor:
        return self._sent(rows_QD, plan.sent_C, plan.received_C)


@planted(
    Expectation("OVLP-03", "even", "run", *NEVER),
    Expectation("EXCH-05", "poisoned-even", "combine", "likely cause", *NEVER),
)
class AnswersNeverAwaited(_Abandoning):
    """Outputs are summed behind a call that returns at once, in the belief that it blocks."""

    def _send_back(self, rows: Tensor, plan: Plan) -> Tensor:
        return self._sent(rows, plan.received_C, plan.sent_C)


@planted(
    Expectation("OVLP-03", "shared-beside-in-flight-uneven", "run", *NEVER),
    Expectation("OVLP-03", "chunks-2-uneven", "run", *NEVER),
    Expectation("SHARE-01", "shared-beside-poisoned-uneven", "combine", "likely cause", *NEVER),
)
class NeverAwaitedMeanwhile(AllToAllExchange):
    """The shared experts, or another chunk, are taken to last long enough for the rows to have come."""

    def depart(self, x: Tensor, routing: Routing) -> Departed:
        rows_QD, plan, permuted = self.planned(x, routing)
        exchange = _Abandoned(plan.sent_C, plan.received_C, self.topology.group("ep"))
        rows = collectives._Depart.apply(rows_QD, exchange)  # type: ignore[no-untyped-call]
        return Departed(rows, exchange, plan, permuted)


@planted(Expectation("OVLP-03", "overlap-uneven", "run", *NEVER, "exchange/collectives.py"))
class StepNeverAwaits(LayerPass):
    """The other microbatch is taken to last long enough for outputs to have come."""

    def _combined(self, rows_RD: Tensor, meanwhile: Callable[[], None] | None = None) -> Pass:
        exchange = _Abandoned(self.plan.received_C, self.plan.sent_C, self.group)
        exchange.start(rows_RD)
        if meanwhile is not None:
            meanwhile()
        yield
        return exchange.wait()
