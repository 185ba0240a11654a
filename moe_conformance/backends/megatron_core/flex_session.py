"""One topology with the flex dispatcher: its exchanges, and the padding of token counts that HybridEP needs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import differences, library
from moe_conformance.backends.megatron_core.configuration import CAPACITY, FUNCTION, LAYER, OF_EXPERTS, ROUTER, SHARED
from moe_conformance.backends.megatron_core.flex import DEEPEP, DEEPEP_V2, HYBRIDEP, NCCLEP, PADS
from moe_conformance.backends.megatron_core.flex_functions import KernelRules, TokenExchange, Transport
from moe_conformance.backends.megatron_core.flex_kernels import SAID, Kernels
from moe_conformance.backends.megatron_core.layer import Layer
from moe_conformance.backends.megatron_core.session import MegatronSession
from moe_conformance.backends.megatron_core.surfaces import Exchange, Experts
from moe_conformance.contract import (
    Capacity,
    Claims,
    Config,
    Delivery,
    ReceiveBuffer,
    Routing,
    Topology,
    Unsupported,
    refusals,
)

ALIGNMENT = 64  # HYBRIDEP_TOKEN_ALIGNMENT of the library; its versions before have none
_BACKENDS = {DEEPEP: "deepep", DEEPEP_V2: "deepepv2", HYBRIDEP: "hybridep", NCCLEP: "ncclep"}
_FLEX = ("padding.tokens", "padding.alignment", "receive_buffer")
BLOCK = 256  # rows, to which a receive buffer is rounded up with the option that it needs
_REFUSED = "dispatcher requires TPxEP > 1|drop and pad is not supported yet"  # by managers, while they are built
_ELSEWHERE = "it does not depend on the dispatcher: judged of the backend megatron-core"


class FlexSession(MegatronSession):
    """A session whose layers have the flex dispatcher."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Put the stand-ins in place, and initialise the parallel state; collective."""
        super().__init__(topology, device)
        self._kernels = Kernels()

    def exchange(self, config: Config) -> FlexExchange:
        """Build a layer and return its token dispatcher."""
        if config.capacity.padded:
            raise Unsupported("the flex dispatcher pads nothing: it takes a map that the router has filled up")
        self._require_divided(config)
        self._kernels.forget()
        layer = self._layer(config.only(*LAYER, *CAPACITY, *OF_EXPERTS, *_FLEX))
        return FlexExchange(layer, config)

    def experts(self, config: Config) -> Experts:
        """Build a layer and return its experts."""
        self._require_divided(config)
        return super().experts(config)

    def token_padding(self, config: Config) -> TokenPadding:
        """Build a layer and return the padding of its manager."""
        if config.variant != HYBRIDEP:
            raise Unsupported(f"the exchange {config.variant!r} pads no token counts")
        return TokenPadding(self.exchange(config))

    def token_exchange(self, config: Config) -> TokenExchange:  # type: ignore[override]  # its combine adds no biases
        """Return the functions of DeepEP's manager."""
        if config.variant != DEEPEP:
            raise Unsupported(f"{config.variant!r} delivers rows in the order of experts, and no token exchange")
        config.only("variant", "experts", "top_k", "hidden", "dtype")
        sizes = self._topology.sizes
        if sizes["etp"] > 1 or config.experts % sizes["ep"]:
            raise Unsupported("fused_dispatch knows of no shards of an expert, and of as many experts on every rank")
        if sizes["ep"] < 2:
            raise Unsupported("DeepEP dispatcher requires TPxEP > 1", by="library")
        group = library.parallel_state.get_expert_tensor_and_model_parallel_group()
        held = config.experts // sizes["ep"]
        first = held * group.rank()
        return TokenExchange(self._kernels, group, config.experts, tuple(range(first, first + held)))

    def transport(self, config: Config) -> Transport:
        """Return the choice of buffers."""
        if config.variant != DEEPEP:
            raise Unsupported(f"{config.variant!r} leaves the transport to its kernels")
        return Transport(self._kernels)

    def config_rules(self, config: Config) -> KernelRules:
        """Resolve settings that name a kernel, on one rank."""
        if self._topology.sizes["world"] > 1:
            raise Unsupported("the adapter resolves settings on one rank")
        return KernelRules(config.only(*FUNCTION), self._topology, self._device, self._kernels)

    def layer(self, config: Config) -> FlexLayer:
        """Build a whole layer."""
        self._kernels.forget()
        built = self._layer(config.only(*LAYER, *ROUTER, *SHARED))
        return FlexLayer(built, config, self._topology)

    def _require_divided(self, config: Config) -> None:
        if config.experts < 1 or config.experts % self._topology.sizes["ep"]:
            raise Unsupported(f"what does not divide is refused by the layer: {_ELSEWHERE}")

    def _layer(self, config: Config, number: int = 1) -> Any:
        with refusals(AssertionError, ValueError, match=_REFUSED):
            return super()._layer(_with_flex(config, self._topology.sizes), number)

    def close(self) -> None:
        """Take the stand-ins out, and destroy the parallel state."""
        self._kernels.forget()
        self._kernels.remove()
        super().close()


def _elsewhere(self: FlexSession, config: Config) -> Any:
    raise Unsupported(_ELSEWHERE)


for _name in (
    "router", "load_meter", "masked_router", "packing", "permutation", "reordering", "initial_router",
    "initial_experts", "training_routers", "balancing_routers", "replay_routers",
):  # fmt: skip
    setattr(FlexSession, _name, _elsewhere)


def _with_flex(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return the config of an all-to-all layer with the fields that make its dispatcher flex."""
    fields: list[tuple[str, Any]] = [
        ("moe_token_dispatcher_type", "flex"),
        ("moe_flex_dispatcher_backend", _BACKENDS[config.variant]),
    ]
    fields += {DEEPEP: _deepep, DEEPEP_V2: _deepep, HYBRIDEP: _hybridep, NCCLEP: _ncclep}[config.variant](config, sizes)
    given = dict(config.extra)
    extra = (*config.extra, *((name, value) for name, value in fields if name not in given))
    return replace(config, variant="alltoall", extra=extra)


def _refuse_budget(config: Config) -> None:
    if config.receive_buffer != ReceiveBuffer():
        raise Unsupported(f"{config.variant} has no receive buffer of a factor that drops what is beyond it")
    if config.padding.tokens != "no":
        raise Unsupported(f"{config.variant} pads no token counts")


def _deepep(config: Config, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    _refuse_budget(config)
    if config.variant == DEEPEP_V2 and not hasattr(library.token_dispatcher, "_DeepepV2Manager"):
        raise Unsupported("this version of Megatron-Core has no manager of DeepEP 2")
    # Its manager masks empty slots only where a capacity factor may leave slots empty; this one drops nothing.
    dropless = config.capacity == Capacity()
    return [("moe_expert_capacity_factor", float(config.experts))] if dropless else []


def _hybridep(config: Config, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    pads = next((name for name in PADS if differences.has_field(name)), None)
    if config.padding.tokens == "bound":
        raise Unsupported("HybridEP's tokens are padded to the largest count of the group, not to a bound")
    if config.padding.tokens == "group_max":
        if pads is None:
            raise Unsupported("this version of Megatron-Core pads no token counts")
        if config.padding.alignment != ALIGNMENT:
            raise Unsupported(f"HybridEP's tokens are padded to multiples of {ALIGNMENT}, which cannot be set")
    fields: list[tuple[str, Any]] = [] if pads is None else [(pads, True)]
    if config.receive_buffer.factor is not None or config.receive_buffer.rows is not None:
        if not differences.has_field("moe_expert_rank_capacity_factor"):
            raise Unsupported("this version of Megatron-Core has no receive buffer of fixed size")
        fields.append(("moe_expert_rank_capacity_factor", _budget(config)))
        fields.append(("use_transformer_engine_op_fuser", True))  # which the factor needs
    elif config.receive_buffer.overflow != "refuse":
        raise Unsupported("nothing overflows without a factor")
    return fields


def _budget(config: Config) -> float:
    """Return the factor; a number of rows can be asked for if it is one block, which the smallest factors make."""
    if config.receive_buffer.factor is not None:
        return config.receive_buffer.factor
    if config.receive_buffer.rows != BLOCK or config.receive_buffer.overflow != "drop":
        raise Unsupported(f"the buffer is a factor, rounded up to {BLOCK} rows, and what is beyond it is dropped")
    return 1.001 / (ALIGNMENT * config.top_k)  # a row for every 64 tokens, all of which are rounded up to one block


def _ncclep(config: Config, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    _refuse_budget(config)
    if not differences.has_field("moe_ncclep_zero_copy") and not differences.has_field("moe_ncclep_static_shape"):
        raise Unsupported("this version of Megatron-Core has no NCCL EP")
    # Where a factor is required, this one holds any load.
    return [("moe_expert_rank_capacity_factor", float(sizes["ep"]))] if _needs_factor() else []


def _needs_factor() -> bool:
    return differences.has_field("moe_ncclep_static_shape")  # and where there is no such switch, the factor makes it


class FlexLayer(Layer):
    """A layer with the flex dispatcher."""

    @property
    def resolved(self) -> Mapping[str, str]:
        """The parts, and that the kernels are stand-ins."""
        return {**super().resolved, **SAID}


class FlexExchange(Exchange):
    """The flex dispatcher, with the claims of its manager."""

    def __init__(self, layer: Any, config: Config) -> None:
        """Take the dispatcher of the layer."""
        super().__init__(layer)
        self._variant, self._manager = config.variant, layer.token_dispatcher._comm_manager
        self._static = config.receive_buffer != ReceiveBuffer()
        self.hidden, self.experts = config.hidden, config.experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher and its manager, and that the kernels are stand-ins."""
        config = self._dispatcher.config
        pads = {name: str(getattr(config, name)) for name in PADS if hasattr(config, name)}
        return {**super().resolved, "manager": type(self._manager).__qualname__, **pads, **SAID}

    @property
    def claims(self) -> Claims:
        """Tokens are sent once to a rank; HybridEP's are padded."""
        found = Claims(
            wire="tokens",
            handed="static" if self._static else "routed",
            multiple=getattr(self._manager, "pad_multiple", None) or 1,
        )
        pads = any(getattr(self._dispatcher.config, name, False) for name in PADS)
        return replace(found, padding="group_max", alignment=ALIGNMENT) if pads else found

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Dispatch; with a receive buffer of fixed size, read and reset its flag, as a trainer does with every step."""
        delivery, handle = super().dispatch(x, routing)
        if not self._static:
            return delivery, handle
        flag = bool(handle.check_over_budget())
        handle.reset_over_budget()
        return replace(delivery, overflowed=flag), handle

    def _of_a_microbatch(self) -> Any:
        dispatcher = super()._of_a_microbatch()
        # All state is on the manager: the layer's own one dispatches nothing.
        dispatcher._comm_manager = self._manager = copy(self._dispatcher._comm_manager)
        return dispatcher

    def padded(self, tokens: int) -> int:
        """Return the number of tokens that the manager dispatches for as many; collective."""
        nothing_TE = torch.zeros(tokens, self.experts)
        self._dispatcher.dispatch_preprocess(torch.zeros(tokens, self.hidden), nothing_TE.bool(), nothing_TE)
        return int(self._dispatcher._comm_manager._padded_num_tokens)


class TokenPadding:
    """The padding of HybridEP's manager."""

    def __init__(self, exchange: FlexExchange) -> None:
        """Take the exchange."""
        self._exchange = exchange

    @property
    def resolved(self) -> Mapping[str, str]:
        """That of the exchange."""
        return self._exchange.resolved

    @property
    def claims(self) -> Claims:
        """That of the exchange."""
        return Claims(padding="group_max", alignment=ALIGNMENT)

    def count(self, tokens: int) -> int:
        """Return what `setup_metadata` pads to; collective."""
        return self._exchange.padded(tokens)
