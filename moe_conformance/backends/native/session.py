"""The native session: builds the surfaces out of the classes that its attributes name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.backends.native.exchange.chunks import ChunkedExchange
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange, LocalExchange
from moe_conformance.backends.native.exchange.equal_splits import EqualSplits, EqualSplitsExchange
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
from moe_conformance.backends.native.fused.low_latency import FixedPlaces, LowLatencyExchange
from moe_conformance.backends.native.fused.managers import DeepEPManager, HybridEPManager, Manager, NCCLEPManager
from moe_conformance.backends.native.fused.surface import ReusableExchange
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.activated_experts import ActivatedExperts, ExpertBiases
from moe_conformance.backends.native.layer.deferred import WeightGradients
from moe_conformance.backends.native.layer.experts import BATCHED, Experts
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.looped_experts import LoopedExperts
from moe_conformance.backends.native.layer.overlapped_pass import LayerPass
from moe_conformance.backends.native.layer.overlapped_step import OverlappedStep
from moe_conformance.backends.native.layer.sharded_experts import ShardedGradients, ShardedParameters
from moe_conformance.backends.native.layer.shared_experts import SharedExperts
from moe_conformance.backends.native.meter import Meter, MeteredExchange
from moe_conformance.backends.native.offered import Offered, offered
from moe_conformance.backends.native.recomputation import Recomputation
from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.losses import RouterLosses
from moe_conformance.backends.native.router.quantile_balancing import QuantileRouters
from moe_conformance.backends.native.router.replay import ReplayRouters
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.backends.native.router.training import TrainingRouters
from moe_conformance.contract import Config, Parametrised, Session, Topology, Unsupported, refusals

# Each of them by some surface: one config serves all surfaces.
_MAPPED = (
    "variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "routing", "capacity",
    "padding.tokens", "padding.alignment", "padding.bound", "padding.packed",
    "padding.splits",  # of padding, not the multiple of rows
)  # fmt: skip
_OF_EXPERTS = ("activation", "expert_biases", "sharding")  # an exchange knows nothing of them
_OF_ROUTERS = ("router_dtype", "jitter")  # of routers alone and in layers

Built = TypeVar("Built")


def native_class(replacement: type) -> type:
    """Return the class of native from which a replacement derives.

    Raises:
        TypeError: it derives from none.
    """
    package = __name__.rpartition(".")[0]
    for each in replacement.__mro__:
        if each.__module__.startswith(f"{package}."):
            return each
    raise TypeError(f"{replacement.__name__} derives from no class of {package}")


class NativeSession(Session):
    """One topology on one rank. `building` returns one that builds other classes in place of native's."""

    weights_at: Literal["input", "expert", "combine"] = "combine"
    expert_output_is_partial = True  # the one part of one where etp = 1
    replaced: ClassVar[Mapping[type, type]] = {}  # native's class: the one that is built in its place

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Keep where this rank stands; the process groups are the topology's."""
        self.topology = topology
        self.device = device
        self.optional = True  # whether shortcuts are taken by what is built
        self.forced_routers = 0  # built so far, in the same order on all ranks
        self.forced: weakref.WeakSet[ForcedRouter] = weakref.WeakSet()
        self.recomputation = self.use(Recomputation)(self.forced)

    @classmethod
    def building(cls, *classes: type) -> type[Self]:
        """Return a session that builds each of these classes in place of the native one from which it derives."""
        replaced = {**cls.replaced, **{native_class(each): each for each in classes}}
        return type(f"{cls.__name__}Building{classes[0].__name__}", (cls,), {"replaced": replaced})

    def use(self, native: type[Built]) -> type[Built]:
        """Return what is built in place of a native class: the class itself, unless it is replaced."""
        return self.replaced.get(native, native)

    def exchange(self, config: Config) -> ClaimingExchange | ChunkedExchange:
        """Build the exchange of `config.variant`.

        Implements: PACK-13, PACK-14, RULE-25.
        """
        if config.overlap.chunks > 1:
            return self._chunked(config)
        asked, config = config, replace(config, token_copies=False)
        with refusals(CannotBuild, match="."):
            exchange: Withdrawing = self._exchange(config)
            if self._pads(config):
                padding = self.use(TokenPadding)(config, self.topology, self.device)
                exchange = self.use(PaddedExchange)(exchange, padding)
            alone = not asked.token_copies or self.topology.sizes["tp"] == 1
            return exchange if alone else self.use(TokenCopies)(exchange, self.topology, asked)

    def _chunked(self, config: Config) -> ChunkedExchange:
        exchange = self.exchange(config.changed({"overlap.chunks": 1}))
        if config.variant != "alltoall" or not isinstance(exchange, AllToAllExchange):
            raise Unsupported("native exchanges in chunks in the variant 'alltoall', without padding and token copies")
        return self.use(ChunkedExchange)(exchange, config.overlap.chunks)

    def token_padding(self, config: Config) -> TokenPadding:
        """Build the padding of the exchange of `config`."""
        config.only(*_MAPPED)
        if not self._pads(config):
            raise Unsupported(f"the exchange {config.variant!r} pads token counts only with padding.tokens")
        with refusals(CannotBuild, match="."):
            self._exchange(config)  # where there is none, there is nothing to pad
            return self.use(TokenPadding)(config, self.topology, self.device)

    def masked_router(self, config: Config) -> Router:
        """Build the router, which takes a mask."""
        if config.capacity.factor is not None:
            raise Unsupported("native drops by capacity where no token is padding")
        return self.router(config)

    def _exchange(self, config: Config) -> LocalExchange | FlexExchange:
        classes: dict[str, type[LocalExchange]] = {
            "alltoall": self.use(AllToAllExchange),
            "allgather": self.use(AllGatherExchange),
            "local": self.use(LocalExchange),
            "lowlatency": self.use(LowLatencyExchange),
        }
        if config.padding.splits == "equal" and config.variant != "alltoall":
            raise Unsupported(f"native pads to equal splits in the variant 'alltoall', not in {config.variant!r}")
        if config.padding.splits == "equal":
            return self.use(EqualSplitsExchange)(config.only(*_MAPPED), self.topology, self.equal_splits(config))
        if self.optional and config.variant == "alltoall" and config.routing.forced == (("round_robin", None),):
            return self.use(RoundRobinExchange)(config.only(*_MAPPED, *_OF_EXPERTS), self.topology)
        if config.variant in classes:
            return classes[config.variant](config.only(*_MAPPED, *_OF_EXPERTS), self.topology)
        if manager := self._managers.get(config.variant):
            config.only(*_MAPPED, *_OF_EXPERTS, "receive_buffer", "wire")
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

    def _pads(self, config: Config) -> bool:
        manager = self._managers.get(config.variant)
        return config.padding.tokens != "no" or bool(manager and manager.needs_equal_tokens)

    def experts(self, config: Config) -> Experts | ActivatedExperts:
        """Build this rank's experts, the same with token_copies and with a receive buffer of fixed size."""
        config.only(*_MAPPED, *_OF_EXPERTS, "receive_buffer", "token_copies")
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
        config.only(*_MAPPED, *_OF_ROUTERS, "gate_bias", *(("token_copies",) if config.routing.forced else ()))
        with refusals(CannotBuild, match="."):
            if not config.routing.forced:
                return self.use(Router)(config, self.device)
            self.forced_routers += 1
            router = self.use(ForcedRouter)(config, self.device, self.topology, self.forced_routers)
            self.forced.add(router)
            return router

    @contextmanager
    def without_optional(self) -> Iterator[Sequence[str]]:
        """Build the plain way meanwhile: experts in a loop, and exchanges that look every id up.

        Implements: FAST-15.
        """
        self.optional = False
        try:
            yield BATCHED, SLICES
        finally:
            self.optional = True

    def initial_router(self, config: Config) -> Router:
        """Build a router with the parameters of a new model."""
        router = self.router(config)
        router.initialise()
        return router

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the routers of a model with their losses."""
        config.only(*_MAPPED, "losses")
        with refusals(CannotBuild, match="."):
            routers = [self.router(replace(config, losses=Config.losses)) for _ in range(config.losses.layers)]
            losses = self.use(RouterLosses)(config, self.topology)
            built = self.use(TrainingRouters)(config, self.topology, routers, losses)
        built.finish_gradients = self.finish_gradients
        return built

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the routers of a model whose balance bias is updated."""
        config.only(*_MAPPED, "balance")
        if not config.routing.balance_bias:
            raise Unsupported("routers without routing.balance_bias have none to update")
        with refusals(CannotBuild, match="."):
            routers = [self.router(replace(config, balance=Config.balance)) for _ in range(config.balance.layers)]
            kind = QuantileRouters if config.balance.rule == "quantile" else BalancingRouters
            return self.use(kind)(config, self.topology, routers)

    def replay_routers(self, config: Config) -> ReplayRouters:
        """Build the routers of a model with router replay."""
        config.only(*_MAPPED, "replay")
        if config.routing.forced or config.capacity.factor is not None:
            raise Unsupported("native replays neither forced routes nor dropped slots")
        with refusals(CannotBuild, match="."):
            routers = [self.router(replace(config, replay=Config.replay)) for _ in config.replay.layers]
            return self.use(ReplayRouters)(config, routers)

    def config_rules(self, config: Config) -> ConfigRules:
        """Build what resolves settings."""
        return self.use(ConfigRules)(config.only(*_MAPPED), self.topology, self.device, self.router)

    def token_exchange(self, config: Config) -> ReusableExchange:
        """Build the token exchange that the managers work over."""
        config.only(*_MAPPED, "wire")
        with refusals(CannotBuild, match="."):
            return self.use(ReusableExchange)(config, self.topology, self.use(TokenExchange), self.use(Float8Wire))

    def layer(self, config: Config) -> Layer:
        """Build a layer of the session's own router, exchange and experts, and its shared experts."""
        config.only(*_MAPPED, *_OF_ROUTERS, "shared")
        if config.shared.overlap and config.padding.splits == "equal":
            raise Unsupported("native has no shared.overlap with padding.splits='equal'")
        routed = replace(config, shared=Config.shared)  # without shared experts
        plain = replace(routed, router_dtype=None, jitter=0.0)
        router, exchange, experts = self.router(routed), self.exchange(plain), self.experts(plain)
        assert isinstance(experts, Experts)  # all others are refused above
        assert not isinstance(exchange, ChunkedExchange)
        with refusals(CannotBuild, match="."):
            return self.use(Layer)(
                config, self.topology, self.device, (router, exchange, experts), self.use(SharedExperts)
            )

    def overlapped_step(self, config: Config) -> OverlappedStep:
        """Build layers whose exchanges overlap with other microbatches."""
        plain = replace(config, overlap=Config.overlap)
        with refusals(CannotBuild, match="."):
            if config.variant != "alltoall" or config.shared.overlap or config.overlap.chunks > 1:
                raise CannotBuild("a step overlaps the variant 'alltoall', without shared.overlap and overlap.chunks")
            if config.padding.tokens != "no" or config.padding.splits == "equal" or config.routing.forced:
                raise CannotBuild("a step overlaps no padded exchange, and no forced routing")
        layers = [self.layer(plain) for _ in range(config.overlap.layers)]
        return self.use(OverlappedStep)(config, layers, self.use(LayerPass), self.use(WeightGradients))

    def equal_splits(self, config: Config) -> EqualSplits:
        """Build what pads pieces for the ranks of ep."""
        config.only(*_MAPPED)
        return self.use(EqualSplits)(self.topology.group("ep"), self.device)

    def load_meter(self, config: Config) -> MeteredExchange:
        """Build the exchange with native's meter attached."""
        meter = self.use(Meter)(self.topology, config, self.device)
        return self.use(MeteredExchange)(config, self.exchange(config), meter)

    def places_exchange(self, config: Config) -> FixedPlaces:
        """Build the exchange with fixed places, for callers."""
        config.only(*_MAPPED)
        with refusals(CannotBuild, match="."):
            return self.use(FixedPlaces)(config, self.topology, self.use(LowLatencyExchange))

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


def _builder(kind: type[Offered]) -> Callable[[NativeSession, Config], Any]:
    def build(session: NativeSession, config: Config) -> Any:
        with refusals(CannotBuild, match="."):
            return session.use(kind)(config.only(*_MAPPED, *kind.maps))

    return build


for _each in offered():
    setattr(NativeSession, _each.surface, _builder(_each))
