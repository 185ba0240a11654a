"""EXCH: exchanges whose combine brings back too little, or from the wrong expert."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation("EXCH-05", "even", "combine", "likely cause: only this rank's part is in it"),
    Expectation("EXPT-01", "own-even", "experts", "likely cause: only this rank's part is in it"),
    Expectation("GRAD-18", "layer-even", "combine", "likely cause: only this rank's part is in it"),
)
class SumOverRanksLeftOut(AllGatherExchange):
    """Every rank takes its own tokens out of its own outputs, and the sum over ranks is left out."""

    def _back(self, rows: Tensor, handle: Any) -> Tensor:
        everything = self._unpermute(rows, handle.permuted)
        rank = self.topology.group("ep_etp").rank()
        return everything.split(handle.sizes_W)[rank].reshape(handle.shape)


@planted(Expectation("EXCH-05", "even", "dispatch", "in place of that of expert", "was answered by another expert"))
class NextExpertAnswers(AllToAllExchange):
    """The first slot of the first token goes to the next expert on the same rank that the token did not select."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if not len(routing.ids_TK):
            return super().dispatch(x, routing)
        ids_TK, held = routing.ids_TK.clone(), self.placement.held
        first = int(ids_TK[0, 0])
        others = [first - first % held + n for n in range(held)]
        free = [e for e in others if first >= 0 and e not in ids_TK[0].tolist()]
        if free:
            ids_TK[0, 0] = free[0]
        return super().dispatch(x, Routing(ids_TK, routing.weights_TK, routing.experts))
