"""Call a router, an exchange or experts under the session's activation recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from moe_conformance.contract import Delivery, ExpertFn, Routed, Router, Routing, Session


def router_again(session: Session, router: Router, x: Tensor) -> Routed:
    """Call a router, and return its first result with weights whose backward calls the router again."""
    first: list[Routed] = []

    def weigh(x: Tensor) -> Tensor:
        first.append(router(x))
        return first[-1].routing.weights_TK

    weights_TK = session.recompute(weigh, x)
    return replace(first[0], routing=replace(first[0].routing, weights_TK=weights_TK))


def exchange_again(
    session: Session,
    exchange: Callable[[Tensor, Routing, ExpertFn], Tensor],
    x: Tensor,
    routing: Routing,
    ask: ExpertFn,
) -> Tensor:
    """Return y of an exchange with its experts; the backward of y calls both again."""

    def call(x: Tensor, weights_TK: Tensor) -> Tensor:
        return exchange(x, replace(routing, weights_TK=weights_TK), ask)

    return session.recompute(call, x, routing.weights_TK)


def experts_again(session: Session, experts: ExpertFn) -> ExpertFn:
    """Return experts whose backward calls them again."""

    def answer(delivery: Delivery) -> Tensor:
        weights_RJ = delivery.weights_RJ
        if weights_RJ is None:
            return session.recompute(lambda rows_RD: experts(replace(delivery, rows_RD=rows_RD)), delivery.rows_RD)

        def weighed(rows_RD: Tensor, weights_RJ: Tensor) -> Tensor:
            return experts(replace(delivery, rows_RD=rows_RD, weights_RJ=weights_RJ))

        return session.recompute(weighed, delivery.rows_RD, weights_RJ)

    return answer
