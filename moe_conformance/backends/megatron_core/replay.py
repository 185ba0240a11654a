"""The routers of a model with router replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.backends.megatron_core.surfaces import Router
from moe_conformance.contract import Claims, Config, Named, Read, Replay, Routed, Unsupported


def with_replay(config: Config) -> Config:
    """Return the config of every layer, with the field of TransformerConfig that enables replay.

    Raises:
        Unsupported: it cannot be asked for.
    """
    if config.replay.recompute:
        raise Unsupported("Megatron-Core recomputes whole layers, not their routers")
    extra = (("moe_enable_routing_replay", True), ("num_layers", config.replay.layers[-1] + 1))
    return replace(config, extra=(*config.extra, *extra), replay=Replay())


class ReplayRouters:
    """One TopKRouter for each layer that has one, each with a RouterReplay, which has room for one microbatch."""

    def __init__(self, layers: Sequence[Any], numbers: Sequence[int]) -> None:
        """Take the layers and their numbers in the model."""
        self._routers, self._numbers = [Router(layer) for layer in layers], numbers
        self._kept: dict[tuple[int, int], Tensor] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """The routers."""
        return self._routers[0].resolved

    @property
    def claims(self) -> Claims:
        """Those of the routers."""
        return self._routers[0].claims

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the weight and the expert bias of every router."""
        for number, router in zip(self._numbers, self._routers, strict=True):
            for window in router.named(read):
                yield Named(window.name, number, window.view)

    def record(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Record, and keep the library's record of every layer."""
        routed = self._route("RECORD", x)
        recorded = library.RouterReplay.get_recorded_data()
        self._kept |= {(number, microbatch): ids_TK for number, ids_TK in zip(self._numbers, recorded, strict=True)}
        return routed

    def records(self) -> Mapping[tuple[int, int], Tensor]:
        """Return the kept records."""
        return self._kept

    def load(self, records: Mapping[tuple[int, int], Tensor]) -> None:
        """Keep other records."""
        self._kept = dict(records)

    def replay(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Load the records of a microbatch into the library, by layer, and replay it."""
        places = [(number, microbatch) for number in self._numbers]
        library.RouterReplay.set_replay_data([self._kept[place] for place in places if place in self._kept])
        return self._route("REPLAY_FORWARD", x)

    def _route(self, action: str, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        library.RouterReplay.set_global_router_replay_action(library.RouterReplayAction[action])
        routed = tuple(router(x_SBD) for router, x_SBD in zip(self._routers, x, strict=True))
        library.RouterReplay.clear_global_router_replay_action()
        return routed
