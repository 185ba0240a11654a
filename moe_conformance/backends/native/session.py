"""The native session, which builds the surfaces."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.chunks import ChunkedExchange
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange, LocalExchange
from moe_conformance.backends.native.exchange.equal_splits import EqualSplitsExchange
from moe_conformance.backends.native.exchange.round_robin import SLICES, RoundRobinExchange
from moe_conformance.backends.native.exchange.token_padding import (
    ClaimingExchange,
    PaddedExchange,
    TokenPadding,
    Withdrawing,
)
from moe_conformance.backends.native.exchange.tp_duplicated_tokens import TokenCopies
from moe_conformance.backends.native.fused.flex import FlexExchange
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.fused.low_latency import LowLatencyExchange
from moe_conformance.backends.native.fused.managers import DeepEPManager, HybridEPManager, Manager, NCCLEPManager
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.activated_experts import ActivatedExperts, ExpertBiases
from moe_conformance.backends.native.layer.experts import BATCHED, Experts, LoopedExperts
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.sharded_experts import ShardedGradients, ShardedParameters
from moe_conformance.backends.native.offered import MAPPED, OF_EXPERTS, OF_ROUTERS, Offer, offered
from moe_conformance.backends.native.recomputation import Recomputation
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Parametrised, Session, Topology, Unsupported, refusals

Built = TypeVar("Built")


def native_class(replacement: type) -> type:
    """Return the class of native from which a replacement derives.

    Raises:
        TypeError: it derives from none.
    """
    package = __name__.rpartition(".")[0]
    for base in replacement.__mro__:
        if base.__module__.startswith(f"{package}."):
            return base
    raise TypeError(f"{replacement.__name__} derives from no class of {package}")


class NativeSession(Session):
    """One topology on one rank. `building` returns one that builds other classes in place of native's."""

    weights_at: Literal["input", "expert", "combine"] = "combine"
    expert_output_is_partial = True  # the one part of one where etp = 1
    replaced: ClassVar[Mapping[type, type]] = {}  # native's class: the one that is built in its place

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Keep the topology, which has the process groups, and the device."""
        self.topology = topology
        self.device = device
        self.optional = True  # whether shortcuts are taken by what is built
        self.forced_routers = 0  # built so far, in the same order on all ranks
        self.forced: weakref.WeakSet[ForcedRouter] = weakref.WeakSet()
        self.recomputation = self.use(Recomputation)(self.forced)

    @classmethod
    def building(cls, *classes: type) -> type[Self]:
        """Return a session that builds each of these classes in place of the native one from which it derives."""
        replaced = {**cls.replaced, **{native_class(replacement): replacement for replacement in classes}}
        return type(f"{cls.__name__}Building{classes[0].__name__}", (cls,), {"replaced": replaced})

    def surface(self, name: str, config: Config) -> Any:
        """Build a surface that one of native's files offers."""
        return getattr(self, name)(config)

    def use(self, native: type[Built]) -> type[Built]:
        """Return the class that is built for a native class: its replacement if there is one, else itself."""
        return self.replaced.get(native, native)

    def exchange(self, config: Config) -> ClaimingExchange | ChunkedExchange:
        """Build the exchange of `config.variant`.

        Implements: PACK-13, PACK-14, RULE-25.
        """
        if config.overlap.chunks > 1:
            return self._chunked(config)
        requested, config = config, replace(config, token_copies=False)
        with refusals(CannotBuild, match="."):
            exchange: Withdrawing = self.unpadded_exchange(config)
            if self.pads(config):
                padding = self.use(TokenPadding)(config, self.topology, self.device)
                exchange = self.use(PaddedExchange)(exchange, padding)
            alone = not requested.token_copies or self.topology.sizes["tp"] == 1
            return exchange if alone else self.use(TokenCopies)(exchange, self.topology, requested)

    def _chunked(self, config: Config) -> ChunkedExchange:
        exchange = self.exchange(config.changed({"overlap.chunks": 1}))
        if config.variant != "alltoall" or not isinstance(exchange, AllToAllExchange):
            raise Unsupported("native exchanges in chunks in the variant 'alltoall', without padding and token copies")
        return self.use(ChunkedExchange)(exchange, config.overlap.chunks)

    def unpadded_exchange(self, config: Config) -> LocalExchange | FlexExchange:
        """Build the exchange of `config.variant`, which pads no token counts."""
        classes: dict[str, type[LocalExchange]] = {
            "alltoall": self.use(AllToAllExchange),
            "allgather": self.use(AllGatherExchange),
            "local": self.use(LocalExchange),
            "lowlatency": self.use(LowLatencyExchange),
        }
        if config.padding.splits == "equal" and config.variant != "alltoall":
            raise Unsupported(f"native pads to equal splits in the variant 'alltoall', not in {config.variant!r}")
        if config.padding.splits == "equal":
            return self.use(EqualSplitsExchange)(
                config.only(*MAPPED), self.topology, self.surface("equal_splits", config)
            )
        if self.optional and config.variant == "alltoall" and config.routing.forced == (("round_robin", None),):
            return self.use(RoundRobinExchange)(config.only(*MAPPED, *OF_EXPERTS), self.topology)
        if config.variant in classes:
            return classes[config.variant](config.only(*MAPPED, *OF_EXPERTS), self.topology)
        if manager := self._managers.get(config.variant):
            config.only(*MAPPED, *OF_EXPERTS, "receive_buffer", "wire")
            return FlexExchange(config, self.topology, manager, self.use(TokenExchange), self.use(Float8Wire))
        known = ", ".join((*classes, *self._managers))
        raise Unsupported(f"native has no variant {config.variant!r}; it has {known}")

    @property
    def _managers(self) -> dict[str, type[Manager]]:
        return {
            "deepep": self.use(DeepEPManager),
            "hybridep": self.use(HybridEPManager),
            "ncclep": self.use(NCCLEPManager),
        }

    def pads(self, config: Config) -> bool:
        """Whether the exchange of `config` pads token counts."""
        manager = self._managers.get(config.variant)
        return config.padding.tokens != "no" or bool(manager and manager.needs_equal_tokens)

    def experts(self, config: Config) -> Experts | ActivatedExperts:
        """Build this rank's experts, the same with token_copies and with a receive buffer of fixed size."""
        config.only(*MAPPED, *OF_EXPERTS, "receive_buffer", "token_copies")
        plain = (config.activation, config.expert_biases) == (Config.activation, Config.expert_biases)
        with refusals(CannotBuild, match="."):
            if config.variant == "local":
                self.use(LocalExchange)(config, self.topology)  # it refuses to spread experts over ranks
            if config.sharding != "own":
                return self._sharded_experts(config)
            if plain:
                kind = Experts if self.optional else LoopedExperts
                return self.use(kind)(config, self.topology, self.device)
            return self.use(ActivatedExperts)(config, self.topology, self.device, self.use(ExpertBiases))

    def _sharded_experts(self, config: Config) -> Experts:
        """Build experts that are shared out among their replicas."""
        if (config.activation, config.expert_biases) != (Config.activation, Config.expert_biases):
            raise Unsupported("native shards plain experts over replicas, without biases and with SwiGLU")
        kind = self.use(ShardedParameters if config.sharding == "parameters" else ShardedGradients)
        return kind(config, self.topology, self.device)

    def router(self, config: Config) -> Router:
        """Build the router.

        Implements: FORCE-01.
        """
        config.only(*MAPPED, *OF_ROUTERS, "gate_bias", *(("token_copies",) if config.routing.forced else ()))
        with refusals(CannotBuild, match="."):
            if not config.routing.forced:
                return self.use(Router)(config, self.device)
            self.forced_routers += 1
            router = self.use(ForcedRouter)(config, self.device, self.topology, self.forced_routers)
            self.forced.add(router)
            return router

    @contextmanager
    def without_optional(self) -> Iterator[Sequence[str]]:
        """Build without shortcuts until the context ends: experts in a loop, and exchanges that look up every id.

        Implements: FAST-15.
        """
        self.optional = False
        try:
            yield BATCHED, SLICES
        finally:
            self.optional = True

    def recompute(self, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `call(*inputs)`, which the backward repeats."""
        return self.recomputation.run(call, inputs)

    def finish_gradients(self, *built: Parametrised) -> None:
        """Sum the gradients of native's router and experts, shared ones too, over their replicas."""
        modules: list[Replicated] = []
        for surface in built:
            if isinstance(surface, Layer | ActivatedExperts):
                modules += surface.parts
            elif isinstance(surface, Replicated):
                modules.append(surface)
            else:
                kinds = ", ".join(type(surface).__name__ for surface in built)
                raise TypeError(f"native finishes the gradients of what native built; this was {kinds}")
        self.use(GradientFinisher)(self.topology).finish(modules)


def _builder(offer: Offer) -> Callable[[NativeSession, Config], Any]:
    def build(session: NativeSession, config: Config) -> Any:
        if offer.maps is not None:
            config.only(*MAPPED, *offer.maps)
        with refusals(CannotBuild, match="."):
            return offer.build(session, config)

    return build


for _each in offered():
    setattr(NativeSession, _each.surface, _builder(_each))
