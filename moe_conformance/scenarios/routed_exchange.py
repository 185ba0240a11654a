"""An exchange that takes its expert ids from a router of the same session; either may have forced routing.

The weights are the workload's, with which every sum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.contract import Claims, Exchange, ExpertFn, Router, Routing, Session, SplitExchange, whole
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.outcome import RouterSeen
from moe_conformance.scenarios.reported import claims_of, without_noise
from moe_conformance.scenarios.tensors import to_cpu
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload


class RoutedExchange:
    """An exchange preceded by a router, both built by the session."""

    def __init__(self, router: Router, exchange: Exchange | SplitExchange) -> None:
        """Keep the router and the exchange."""
        self._router, self._exchange, self._whole = router, exchange, whole(exchange)
        self.local_experts = tuple(exchange.local_experts)
        self.seen = RouterSeen()  # what the router returned last

    @property
    def resolved(self) -> Mapping[str, str]:
        """The `resolved` entries of the router and the exchange."""
        return {**self._router.resolved, **self._exchange.resolved}

    @property
    def claims(self) -> Claims:
        """What the exchange claims."""
        return claims_of(self._exchange)

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Return y for the expert ids that the router selects."""
        with torch.no_grad():
            ids_TK = self._router(x.detach()).routing.ids_TK
        self.seen = RouterSeen(ids_TK=to_cpu(ids_TK))
        return self._whole(x, replace(routing, ids_TK=ids_TK), expert)


def exchange_of(session: Session, workload: Workload) -> Exchange | SplitExchange:
    """Build the exchange of a workload, with a router before it if its ids come from one."""
    run, config = workload.run, workload.config
    if not isinstance(run, ExchangeStep) or not run.routed:
        return session.exchange(config)
    unforced = config.changed({"routing.forced": ()})
    router = session.router(unforced if run.routed == "exchange forced" else config)
    parameters.write(router, workload.parameters)
    without_noise(router)
    return RoutedExchange(router, session.exchange(unforced if run.routed == "router forced" else config))


def may_refuse_routes(workload: Workload) -> bool:
    """Return whether the exchange may refuse its ids: it relies on forced routing, and the router does not force."""
    run = workload.run
    return isinstance(run, ExchangeStep) and run.routed == "exchange forced"
