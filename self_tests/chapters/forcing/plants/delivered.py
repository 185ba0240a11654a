"""FORCE: bugs of exchanges that rely on forced routing, and of what routers report of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.exchange.round_robin import RoundRobinExchange
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Routing
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation(
        "FORCE-20", "routed-round-robin-exchange-alone", "dispatch", "was delivered to expert", "on rank 1 instead of"
    )
)
class AnyRoutesAreDealt(RoundRobinExchange):
    """The ids of a token other than the first are not looked at: a router that is not forced gets other experts."""

    def _dealt(self, routing: Routing) -> bool:
        return True


@planted(Expectation("FORCE-20", "routed-hot-rank", "dispatch", "was delivered to expert", "instead of"))
class DealsWhateverIsForced(AllToAllExchange):
    """An exchange that is told of any forced routing deals the experts out by itself."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        if self.config.routing.forced:
            T, K = routing.ids_TK.shape
            dealt_TK = torch.arange(T * K, device=x.device).reshape(T, K) % routing.experts
            routing = replace(routing, ids_TK=dealt_TK)
        return super()._permute(x, routing, room)


@planted(
    Expectation(
        "FORCE-20", "forced-round-robin-groups", "route", "rank 0 reports the strategy random; in force is round_robin"
    ),
    Expectation("FORCE-23", "forced-round-robin-groups", "route", "is forced to route by the strategy round_robin"),
)
class ReportsRandom(ForcedRouter):
    """Whatever forces the routes is reported as random, which was the only strategy once."""

    @property
    def resolved(self) -> Mapping[str, str]:
        return {**super().resolved, "forced": "random"}


@planted(
    Expectation(
        "FORCE-23",
        "forced-random-groups",
        "route",
        "by the strategy random, and has no resolved['forced']",
    ),
    Expectation("FORCE-23", "hot-rank", "route", "by the strategy worst_rank, and has no resolved['forced']"),
)
class ForcedInSilence(ForcedRouter):
    """A forced router looks like any other."""

    @property
    def resolved(self) -> Mapping[str, str]:
        return {name: text for name, text in super().resolved.items() if name != "forced"}


@planted(
    Expectation("FORCE-23", "forced-biased-groups", "route", "by the strategy biased by 0.5, and reports 'biased'"),
    Expectation("FORCE-23", "hot-rank-by-ratio", "route", "by the strategy ratio by 2.5, and reports 'ratio'"),
)
class ParameterUntold(ForcedRouter):
    """The strategy is reported without its parameter."""

    @property
    def resolved(self) -> Mapping[str, str]:
        return {**super().resolved, "forced": self.strategy}


@planted(
    Expectation(
        "FORCE-23", "route-groups-top2-softmax", "route", "reports 'routes are forced: random'", "is not forced by"
    )
)
class WarnsOfTheOption(Router):
    """Every router warns of the option, whether it is used or not."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        warnings.warn("routes are forced: random", stacklevel=2)
