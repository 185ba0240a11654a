"""The routers of a model that record the experts they select, and replay them by layer and microbatch.

T tokens, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.offered import offers
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Named, Read, Routed, Unsupported

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

Place = tuple[int, int]  # number of the layer in the model, and of the microbatch


class NoRecord(LookupError):
    """A router is to replay what was not recorded, or not of as many tokens and slots."""


class ReplayRouters(Replicated):
    """One router for each layer that has one."""

    replicas = ("dp_cp", "tp")

    def __init__(self, config: Config, routers: list[Router]) -> None:
        """Take the routers, in the order of layers."""
        super().__init__()
        self.config = config
        self.routers = nn.ModuleList(routers)
        self.kept: dict[Place, Tensor] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes that were built."""
        return {"routers": type(self).__name__}

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router of every layer under its number in the model, and its balance bias if there is one."""
        for layer, router in zip(self.config.replay.layers, self.routers, strict=True):
            for window in router.named(read):  # type: ignore[operator]
                yield Named(window.name, layer, window.view)

    def record(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Route, and keep the ids.

        Implements: ROUTE-17.
        """
        routed = tuple(router(x_SBD) for router, x_SBD in zip(self.routers, x, strict=True))
        for layer, of_layer in zip(self.config.replay.layers, routed, strict=True):
            self.kept[layer, microbatch] = of_layer.routing.ids_TK.clone()
        return routed

    def records(self) -> Mapping[Place, Tensor]:
        """Return all that is kept."""
        return dict(self.kept)

    def load(self, records: Mapping[Place, Tensor]) -> None:
        """Keep these records alone."""
        self.kept = dict(records)

    def replay(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Route to what was recorded."""
        return tuple(self._one(number, microbatch, x_SBD) for number, x_SBD in enumerate(x))

    def _one(self, number: int, microbatch: int, x: Tensor) -> Routed:
        if self.config.replay.recompute:
            how: dict[str, Any] = {"use_reentrant": False}
            routed: Routed = checkpoint(self.again, number, microbatch, x, **how)
            return routed
        return self.again(number, microbatch, x)

    def again(self, number: int, microbatch: int, x: Tensor) -> Routed:
        """Return what the router of a layer makes of the recorded ids.

        Implements: ROUTE-16.
        """
        ids_TK = self.recorded((self.config.replay.layers[number], microbatch), x.numel() // x.shape[-1])
        routed: Routed = self.routers[number](x, recorded_TK=ids_TK)
        return routed

    def recorded(self, place: Place, tokens: int) -> Tensor:
        """Return the ids of a place.

        Implements: ROUTE-17.

        Raises:
            NoRecord: there are none, or of another number of tokens or slots.
        """
        ids_TK = self.kept.get(place)
        shape = (tokens, self.config.top_k)
        if ids_TK is None or tuple(ids_TK.shape) != shape:
            has = "none" if ids_TK is None else f"one of {tuple(ids_TK.shape)}"
            raise NoRecord(
                f"layer {place[0]} is to replay a record of {shape} for microbatch {place[1]}: there is {has}"
            )
        return ids_TK


@offers("replay_routers", maps=("replay",))
def replay_routers(session: NativeSession, config: Config) -> ReplayRouters:
    """Build the routers of a model with router replay."""
    if config.routing.forced or config.capacity.factor is not None:
        raise Unsupported("native replays neither forced routes nor dropped slots")
    routers = [session.router(replace(config, replay=Config.replay)) for _ in config.replay.layers]
    return session.use(ReplayRouters)(config, routers)
