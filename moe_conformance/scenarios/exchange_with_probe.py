"""An exchange for scripts that calls the suite's probe expert, since a call of a script cannot pass an expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_conformance.contract import Claims, Config, Delivery, Exchange, Routing, Session, SplitExchange, whole
from moe_conformance.contract.topology import Topology
from moe_conformance.scenarios.probe import Probe, part_of
from moe_conformance.scenarios.reported import claims_of


@dataclass(frozen=True)
class Dispatched:
    """The delivery and the handle that a dispatch returned."""

    delivery: Delivery
    handle: Any


class Whole:
    """An exchange with the probe expert, as one call."""

    def __init__(self, exchange: Exchange | SplitExchange, probe: Probe) -> None:
        """Keep the exchange and the probe expert."""
        self._whole, self._probe = whole(exchange), probe
        self._placed = exchange
        self.local_experts = tuple(exchange.local_experts)

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the exchange reports now."""
        return self._placed.resolved

    @property
    def claims(self) -> Claims:
        """What the exchange claims now."""
        return claims_of(self._placed)

    def step(self, x: Tensor, routing: Routing) -> Tensor:
        """Return y of dispatch, probe expert and combine."""
        return self._whole(x, routing, self._probe)


class Halves(Whole):
    """An exchange with the probe expert, as one call or as dispatch and combine."""

    def __init__(self, exchange: SplitExchange, probe: Probe) -> None:
        """Keep the exchange and the probe expert."""
        super().__init__(exchange, probe)
        self._exchange = exchange

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Return the delivery and the handle."""
        return Dispatched(*self._exchange.dispatch(x, routing))

    def combine(self, answers_of: Dispatched, handle_of: Dispatched, width: int | None = None) -> Tensor:
        """Combine the expert outputs of one dispatch, or their first `width` columns, with the handle of another."""
        return self._exchange.combine(self._probe(answers_of.delivery)[..., :width], handle_of.handle)


def exchange_with_probe(
    exchange: Exchange | SplitExchange, config: Config, session: Session, topology: Topology
) -> Whole:
    """Return the exchange that scripts call; it has `dispatch` and `combine` only if the backend's has them."""
    probe = Probe(config, tuple(exchange.local_experts), part_of(session, topology))
    return Halves(exchange, probe) if isinstance(exchange, SplitExchange) else Whole(exchange, probe)
