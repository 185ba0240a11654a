"""Backends that report forced routing, or rely on it, in other ways than native: they must pass."""

# ruff: noqa: D102 - a class says what its methods do otherwise
from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import Permuted
from moe_conformance.backends.native.exchange.round_robin import RoundRobinExchange
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.contract import Config, Routing, Topology, Unsupported


class WarnsWhenBuilt(ForcedRouter):
    """Strategy and parameter are in a warning, and `resolved` tells nothing of them."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        name = self.strategy.replace("_", "-")
        warnings.warn(f"Routing is forced ({name}, {self.parameter}): results mean nothing", stacklevel=2)

    @property
    def resolved(self) -> Mapping[str, str]:
        return {name: text for name, text in super().resolved.items() if name != "forced"}


class RefusesOtherRoutes(RoundRobinExchange):
    """An exchange that relies on a round robin refuses ids of which there is none."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        if routing.ids_TK.numel() and not self._dealt(routing):
            raise Unsupported("the ids are not those of a round robin", by="library")
        return super()._permute(x, routing, room)


class Warned(Native):
    """Native, whose router warns."""

    session_class = NativeSession.building(WarnsWhenBuilt)


class Refusing(Native):
    """Native, whose exchange of a round robin refuses others."""

    session_class = NativeSession.building(RefusesOtherRoutes)
