"""The native session: builds the surfaces out of the classes that its attributes name."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from moe_conformance.backends.native.dispatch_layout import DispatchLayout
from moe_conformance.backends.native.exchange import AllGatherExchange, AllToAllExchange, LocalExchange
from moe_conformance.backends.native.experts import Experts
from moe_conformance.backends.native.flex import FlexExchange
from moe_conformance.backends.native.float8 import Float8Wire
from moe_conformance.backends.native.forcing import ForcedRouter
from moe_conformance.backends.native.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer import Layer
from moe_conformance.backends.native.low_latency import FixedPlaces, LowLatencyExchange
from moe_conformance.backends.native.managers import DeepEPManager, HybridEPManager, Manager, NCCLEPManager
from moe_conformance.backends.native.packing import Packing
from moe_conformance.backends.native.padding import PaddedExchange, TokenPadding, Withdrawing
from moe_conformance.backends.native.reordering import Reordering
from moe_conformance.backends.native.reusable import ReusableExchange
from moe_conformance.backends.native.routing import Router
from moe_conformance.backends.native.routing_forms import RoutingForms
from moe_conformance.backends.native.row_index import RowIndex
from moe_conformance.backends.native.rows import Permutation
from moe_conformance.backends.native.shared_experts import SharedExperts
from moe_conformance.backends.native.token_copies import TokenCopies
from moe_conformance.backends.native.token_exchange import TokenExchange
from moe_conformance.backends.native.transport import Transport
from moe_conformance.contract import Config, Parametrised, SplitExchange, Topology, Unsupported, refusals
from moe_conformance.surfaces import Session

# Each of them by some surface: one config serves all surfaces.
_MAPPED = (
    "variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied",
    "score", "normalise", "scale", "groups", "group_score", "balance_bias", "forced",
    "capacity_factor", "min_capacity", "drop_policy", "pad_to_capacity",
    "pad_tokens", "token_alignment", "token_bound", "packed",
)  # fmt: skip
_BUDGET = ("budget_factor", "row_budget", "over_budget")
_SHARED = ("shared_ffn", "shared_gate", "shared_overlap", "shared_bias")


class NativeSession(Session):
    """One topology on one rank. Swap a class attribute to swap what is built."""

    weights_at: Literal["input", "expert", "combine"] = "combine"
    expert_output_is_partial = True  # the one part of one where etp = 1

    alltoall_class: type[LocalExchange] = AllToAllExchange
    allgather_class: type[LocalExchange] = AllGatherExchange
    local_class: type[LocalExchange] = LocalExchange
    lowlatency_class: type[LowLatencyExchange] = LowLatencyExchange
    deepep_class: type[Manager] = DeepEPManager
    hybridep_class: type[Manager] = HybridEPManager
    ncclep_class: type[Manager] = NCCLEPManager
    token_exchange_class: type[TokenExchange] = TokenExchange  # under the managers
    float8_class: type[Float8Wire] = Float8Wire
    reusable_class: type[ReusableExchange] = ReusableExchange  # over the same, for callers
    places_class: type[FixedPlaces] = FixedPlaces  # over the low-latency exchange, for callers
    padding_class: type[TokenPadding] = TokenPadding
    packing_class: type[Packing] = Packing
    padded_class: type[PaddedExchange] = PaddedExchange  # around any of the exchanges
    copies_class: type[TokenCopies] = TokenCopies  # around any of these
    experts_class: type[Experts] = Experts
    router_class: type[Router] = Router
    forced_router_class: type[ForcedRouter] = ForcedRouter
    permutation_class: type[Permutation] = Permutation
    reordering_class: type[Reordering] = Reordering
    row_index_class: type[RowIndex] = RowIndex
    routing_forms_class: type[RoutingForms] = RoutingForms
    dispatch_layout_class: type[DispatchLayout] = DispatchLayout
    transport_class: type[Transport] = Transport
    layer_class: type[Layer] = Layer
    shared_class: type[SharedExperts] = SharedExperts
    finisher_class: type[GradientFinisher] = GradientFinisher

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Keep where this rank stands; the process groups are the topology's."""
        self.topology = topology
        self.device = device
        self.forced_routers = 0  # built so far, in the same order on all ranks

    def exchange(self, config: Config) -> SplitExchange:
        """Build the exchange of `config.variant`."""
        asked, config = config, replace(config, token_copies=False)
        with refusals(CannotBuild, match="."):
            exchange: Withdrawing = self._exchange(config)
            if self._pads(config):
                exchange = self.padded_class(exchange, self.padding_class(config, self.topology, self.device))
            alone = not asked.token_copies or self.topology.sizes["tp"] == 1
            return exchange if alone else self.copies_class(exchange, self.topology, asked)

    def token_padding(self, config: Config) -> TokenPadding:
        """Build the padding of the exchange of `config`."""
        config.only(*_MAPPED)
        if not self._pads(config):
            raise Unsupported(f"the exchange {config.variant!r} pads no token counts unless it is asked to")
        with refusals(CannotBuild, match="."):
            self._exchange(config)  # where there is none, there is nothing to pad
            return self.padding_class(config, self.topology, self.device)

    def packing(self, config: Config) -> Packing:
        """Build what lays sequences out."""
        config.only(*_MAPPED)
        return self.packing_class()

    def masked_router(self, config: Config) -> Router:
        """Build the router, which takes a mask."""
        if config.capacity_factor is not None:
            raise Unsupported("native drops by capacity where no token is padding")
        return self.router(config)

    def _exchange(self, config: Config) -> LocalExchange | FlexExchange:
        classes: dict[str, type[LocalExchange]] = {
            "alltoall": self.alltoall_class,
            "allgather": self.allgather_class,
            "local": self.local_class,
            "lowlatency": self.lowlatency_class,
        }
        if config.variant in classes:
            return classes[config.variant](config.only(*_MAPPED), self.topology)
        if manager := self._managers.get(config.variant):
            config.only(*_MAPPED, *_BUDGET, "wire")
            return FlexExchange(config, self.topology, manager, self.token_exchange_class, self.float8_class)
        known = ", ".join((*classes, *self._managers))
        raise Unsupported(f"native has no variant {config.variant!r}; it has {known}")

    @property
    def _managers(self) -> dict[str, type[Manager]]:
        return {"deepep": self.deepep_class, "hybridep": self.hybridep_class, "ncclep": self.ncclep_class}

    def _pads(self, config: Config) -> bool:
        manager = self._managers.get(config.variant)
        return config.pad_tokens != "no" or bool(manager and manager.needs_equal_tokens)

    def experts(self, config: Config) -> Experts:
        """Build this rank's experts, to which copies of tokens and buffers of fixed size are nothing special."""
        config.only(*_MAPPED, *_BUDGET, "token_copies")
        with refusals(CannotBuild, match="."):
            return self.experts_class(config, self.topology, self.device)

    def router(self, config: Config) -> Router:
        """Build the router."""
        config.only(*_MAPPED, *(("token_copies",) if config.forced else ()))
        with refusals(CannotBuild, match="."):
            if not config.forced:
                return self.router_class(config, self.device)
            self.forced_routers += 1
            return self.forced_router_class(config, self.device, self.topology, self.forced_routers)

    def permutation(self, config: Config) -> Permutation:
        """Build what sorts tokens by expert."""
        with refusals(CannotBuild, match="."):
            return self.permutation_class(config.only(*_MAPPED, "row_multiple"))

    def reordering(self, config: Config) -> Reordering:
        """Build what sorts received rows by expert."""
        config.only(*_MAPPED)
        return self.reordering_class()

    def row_index(self, config: Config) -> RowIndex:
        """Build what finds rows by index."""
        config.only(*_MAPPED)
        return self.row_index_class()

    def routing_forms(self, config: Config) -> RoutingForms:
        """Build what turns routings into maps."""
        return self.routing_forms_class(config.only(*_MAPPED))

    def token_exchange(self, config: Config) -> ReusableExchange:
        """Build the token exchange that the managers work over."""
        config.only(*_MAPPED, "wire")
        with refusals(CannotBuild, match="."):
            return self.reusable_class(config, self.topology, self.token_exchange_class, self.float8_class)

    def dispatch_layout(self, config: Config) -> DispatchLayout:
        """Build what counts where tokens go."""
        config.only(*_MAPPED)
        return self.dispatch_layout_class()

    def transport(self, config: Config) -> Transport:
        """Build what tells local groups from others."""
        config.only(*_MAPPED)
        return self.transport_class()

    def layer(self, config: Config) -> Layer:
        """Build a layer of the session's own router, exchange and experts, and its shared experts."""
        config.only(*_MAPPED, *_SHARED)
        routed = replace(config, shared_ffn=(), shared_gate=False, shared_overlap=False, shared_bias=False)
        parts = (self.router(routed), self.exchange(routed), self.experts(routed))
        with refusals(CannotBuild, match="."):
            return self.layer_class(config, self.topology, self.device, parts, self.shared_class)

    def places_exchange(self, config: Config) -> FixedPlaces:
        """Build the exchange with fixed places, for callers."""
        config.only(*_MAPPED)
        with refusals(CannotBuild, match="."):
            return self.places_class(config, self.topology, self.lowlatency_class)

    def finish_gradients(self, *built: Parametrised) -> None:
        """Sum the gradients of native's router and experts, shared ones too, over their replicas."""
        modules: list[Replicated] = []
        for surface in built:
            if isinstance(surface, Layer):
                modules += surface.parts
            elif isinstance(surface, Replicated):
                modules.append(surface)
            else:
                kinds = ", ".join(type(surface).__name__ for surface in built)
                raise TypeError(f"native finishes the gradients of what native built; this was {kinds}")
        self.finisher_class(self.topology).finish(modules)
