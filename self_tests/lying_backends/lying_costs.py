"""Backends that excuse by a claim what they send or deliver too much, or too unevenly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_conformance.backends.native import NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.contract import Claims, Delivery, Routing
from self_tests.lying_backends.lying import Liar


class _Thrice(AllToAllExchange):
    """Rows go out three times, of which one is delivered."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        for _ in range(2):
            super().dispatch(x.detach(), routing)
        return super().dispatch(x, routing)


class _ThriceAsCopies(_Thrice):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="copies")


class ThriceAsCopies(Liar):
    """Sends rows three times, and claims that its adapter gathers tokens over tp, whose rows are not counted."""

    name = "lying-thrice-as-copies"
    session_class = NativeSession.building(_ThriceAsCopies)


class _ThriceAsCapacity(_Thrice):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="capacity")


class ThriceAsCapacity(Liar):
    """Sends rows three times, and claims that a capacity of rows goes to every expert, which would be more still."""

    name = "lying-thrice-as-capacity"
    session_class = NativeSession.building(_ThriceAsCapacity)


class _SaysStatic(AllToAllExchange):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, handed="static")


class SaysStatic(Liar):
    """Delivers the routed rows, and claims a fixed number of them, of which COST-10 would say nothing."""

    name = "lying-says-static"
    session_class = NativeSession.building(_SaysStatic)
