"""An exchange for scripts, with the suite's expert at hand: an expert is no data that a call could be given."""

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
    """Both halves of what a dispatch returned."""

    delivery: Delivery
    handle: Any


class Whole:
    """An exchange in one call."""

    def __init__(self, exchange: Exchange | SplitExchange, probe: Probe) -> None:
        """Take both."""
        self._whole, self._probe = whole(exchange), probe
        self._placed = exchange
        self.local_experts = tuple(exchange.local_experts)

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the exchange shows of itself by now."""
        return self._placed.resolved

    @property
    def claims(self) -> Claims:
        """What the exchange claims by now."""
        return claims_of(self._placed)

    def step(self, x: Tensor, routing: Routing) -> Tensor:
        """Return y."""
        return self._whole(x, routing, self._probe)


class Halves(Whole):
    """And in two."""

    def __init__(self, exchange: SplitExchange, probe: Probe) -> None:
        """Take both."""
        super().__init__(exchange, probe)
        self._exchange = exchange

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Return the delivery and the handle."""
        return Dispatched(*self._exchange.dispatch(x, routing))

    def combine(self, answers_of: Dispatched, handle_of: Dispatched, width: int | None = None) -> Tensor:
        """Combine the expert outputs to one dispatch, or the first columns of them, under the handle of another."""
        return self._exchange.combine(self._probe(answers_of.delivery)[..., :width], handle_of.handle)


def exchange_with_probe(
    exchange: Exchange | SplitExchange, config: Config, session: Session, topology: Topology
) -> Whole:
    """Return what scripts call; with `dispatch` and `combine` only where the exchange has them."""
    probe = Probe(config, tuple(exchange.local_experts), part_of(session, topology))
    return Halves(exchange, probe) if isinstance(exchange, SplitExchange) else Whole(exchange, probe)
