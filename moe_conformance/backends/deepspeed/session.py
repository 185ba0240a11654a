"""One topology: the library's global groups, the surfaces built in it, and the end of a step."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from moe_conformance.backends.deepspeed import autoep_session, library
from moe_conformance.backends.deepspeed.autoep import AutoEPExchange
from moe_conformance.backends.deepspeed.autoep_model import AutoEPExperts, AutoEPLayer
from moe_conformance.backends.deepspeed.autoep_session import AutoEPParts, require_other
from moe_conformance.backends.deepspeed.config_rules import ConfigRules
from moe_conformance.backends.deepspeed.exchange import Exchange
from moe_conformance.backends.deepspeed.experts import Expert, Experts, engine_of
from moe_conformance.backends.deepspeed.layer import Layer
from moe_conformance.backends.deepspeed.placement import Placement, build
from moe_conformance.backends.deepspeed.router import ChoiceRouter, Gate, gate_options
from moe_conformance.backends.deepspeed.trainer import Trainer
from moe_conformance.backends.deepspeed.training import TrainingRouters, coefficient_of
from moe_conformance.contract import Config, Parametrised, Session, TokenPadding, Topology, Training, Unsupported

_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype")
_GATE = (*_SHAPE, "routing", "router_dtype", "jitter", "gate_bias")
_REDUCED = (torch.float32, torch.bfloat16)
_CAPACITY = ("capacity.factor", "capacity.minimum", "capacity.drop_policy")


class DeepSpeedSession(Session):
    """Parts of MoE layers; every layer is in a separate engine, as `deepspeed.initialize` makes it."""

    loss_convention: Literal["sum", "mean_over_dp"] = "mean_over_dp"

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Make the library's groups; collective."""
        self._topology, self._device = topology, device
        self.placement = Placement(topology)
        self._autoep = AutoEPParts(self.placement, device, self.engine)
        self._quiet = library.quiet()

    def exchange(self, config: Config) -> Exchange | AutoEPExchange:
        """Build a MOELayer around a given routing and given experts; it takes any T, also packed."""
        if config.variant == autoep_session.NAME:
            return self._autoep.exchange(config)
        config.only(*_SHAPE, "weights_applied", "token_copies", "padding.packed", "capacity.padded")
        if config.capacity.padded and self._topology.sizes["tp"] > 1:
            raise Unsupported("tensor ranks of a gate without drops: it reads their number from a model's mpu")
        if config.weights_applied == "input":
            raise Unsupported("the layer multiplies the experts' output by the weights, not weights_applied='input'")
        self._require_copies(config)
        return Exchange(config, self.placement)

    def experts(self, config: Config) -> Experts | AutoEPExperts:
        """Build a layer and return its experts."""
        if config.variant == autoep_session.NAME:
            return self._autoep.experts(config)
        config.only(*_SHAPE, "weights_applied", "token_copies", "capacity.padded")
        self._require_copies(config)
        layer = self._layer(config)
        layer.deepspeed_moe.gate.requires_grad_(False)
        return Experts(self.engine(layer, config), self.placement.held(config.experts))

    def router(self, config: Config) -> Gate | ChoiceRouter:
        """Build a layer and return its gate, or AutoEP's router, of this variant and where it alone has the routing."""
        if config.variant != autoep_session.NAME:
            config.only(*_GATE, *_CAPACITY)
            _require_float32(config)
            try:
                options = gate_options(config)
            except Unsupported:
                if config.capacity.factor is not None or config.jitter:
                    raise
            else:
                return self._gate(config, options)
        router = self._autoep.router(config)
        if config.dtype in _REDUCED:
            router.engine = self.engine(router.module, config)
        return router

    def masked_router(self, config: Config) -> Gate:
        """Build a layer and return its gate, which takes a mask of used tokens."""
        require_other(config, "mask of used tokens")
        config.only(*_GATE)
        _require_float32(config)
        return self._gate(config, gate_options(config))

    def _gate(self, config: Config, options: Mapping[str, Any]) -> Gate:
        return Gate(self.engine(self._gates(config, options, 1), config), 0)

    def _gates(self, config: Config, options: Mapping[str, Any], layers: int) -> nn.Module:
        """Build layers of which the gates alone train."""
        model = [self._layer(config, **options) for _ in range(layers)]
        for layer in model:
            layer.deepspeed_moe.experts.requires_grad_(False)
        return nn.ModuleList(model)

    def initial_router(self, config: Config) -> Gate | ChoiceRouter:
        """Build a gate in an engine, which hands the parameters of the first data parallel rank to all."""
        return self.router(config)

    def layer(self, config: Config) -> Layer | AutoEPLayer:
        """Build a whole layer."""
        if config.variant == autoep_session.NAME:
            return self._autoep.layer(config)
        config.only(*_GATE, *_CAPACITY)
        _require_float32(config)
        engine = self.engine(self._layer(config, **gate_options(config)), config)
        return Layer(engine, config, self.placement)

    def trainer(self, config: Config) -> Trainer:
        """Build a model of dense and MoE layers in an engine with its optimizer."""
        config.only(*_SHAPE, "training", "sharding")
        if self._topology.sizes["tp"] * self._topology.sizes["pp"] > 1:
            raise Unsupported("training steps of DeepSpeed are adapted without tensor ranks and pipeline stages")
        if config.sharding == "parameters" or config.dtype not in _REDUCED:
            raise Unsupported("training steps of DeepSpeed are adapted in float32 and bfloat16, with ZeRO 0, 1 and 2")
        plain = replace(config, training=Training(), sharding="own")
        if config.variant == autoep_session.NAME:
            layers = [self._autoep.built(plain) for _ in range(config.training.layers)]
        else:
            layers = [self._layer(plain, **gate_options(plain)) for _ in range(config.training.layers)]
        return Trainer(config, layers, self.placement, self._device)

    def training_routers(self, config: Config) -> TrainingRouters:
        """Build the layers of a model and return their gates."""
        require_other(config, "loss")
        config.only(*_GATE, *_CAPACITY, "losses")
        _require_float32(config)
        coefficient, options = coefficient_of(config, self._topology.sizes["cp"]), gate_options(config)
        engine = self.engine(self._gates(config, options, config.losses.layers), config)
        gates = [Gate(engine, number) for number in range(config.losses.layers)]
        return TrainingRouters(engine, gates, coefficient, self.placement)

    def config_rules(self, config: Config) -> ConfigRules:
        """Resolve settings on one rank, on which a layer of any sizes can be built."""
        require_other(config, "settings that are resolved here: these are of the layer of GShard's kind")
        if self._topology.sizes["world"] > 1:
            raise Unsupported("the adapter resolves settings on one rank")
        return ConfigRules(config.only(*_SHAPE, "padding.packed"), self.placement)

    def token_padding(self, config: Config) -> TokenPadding:
        """Refuse: T is taken as it is."""
        del config
        raise Unsupported("DeepSpeed pads the rows of experts, and no rank's tokens")

    def _require_copies(self, config: Config) -> None:
        tp = self._topology.sizes["tp"]
        if tp > 1 and not config.token_copies:
            raise Unsupported(f"tp = {tp} without token_copies: the layer's tensor ranks hold the same tokens")

    def _layer(self, config: Config, **gate: Any) -> Any:
        tp = self._topology.sizes["tp"]
        if tp > 1 and config.capacity.factor is not None:
            raise Unsupported(f"tp = {tp} with a capacity, which is that of all tensor ranks' tokens, and may raise")
        return build(config, self.placement, Expert(config), **gate).to(self._device, config.dtype)

    def engine(self, model: nn.Module, config: Config) -> Any:
        """Return the library's engine of a model; collective."""
        if config.dtype not in _REDUCED:
            raise Unsupported(f"the engine reduces gradients of float32 and bfloat16 on CPUs, not of {config.dtype}")
        return engine_of(model, self.placement.unit)

    def finish_gradients(self, *built: Parametrised) -> None:
        """Let the engine of every surface reduce gradients over the ranks that hold the same parameters."""
        for surface in built:
            # There are no others with parameters.
            assert isinstance(surface, Experts | Gate | ChoiceRouter | Layer | AutoEPExperts | AutoEPLayer)
            if isinstance(surface, Gate | ChoiceRouter) and self._topology.sizes["tp"] > 1:
                raise Unsupported("the engine sums no gradients over tensor ranks: they route the same tokens")
            if surface.engine is None:
                raise Unsupported("the engine reduces gradients of float32 and bfloat16 on CPUs, not of other types")
            surface.engine.allreduce_gradients()

    def close(self) -> None:
        """Destroy the library's groups."""
        self._quiet.__exit__(None, None, None)
        self.placement.close()
        gc.collect()  # engines refer to their groups in cycles, and a group has threads until it is freed


def _require_float32(config: Config) -> None:
    if config.router_dtype not in (None, torch.float32):
        raise Unsupported(f"DeepSpeed's gates compute in float32, and have no option for {config.router_dtype}")
