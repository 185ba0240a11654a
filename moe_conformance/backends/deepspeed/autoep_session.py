"""What a session builds of AutoEP's layer, which is the variant `autoep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_conformance.backends.deepspeed.autoep import AutoEPExchange, autoep_layer
from moe_conformance.backends.deepspeed.autoep_model import AutoEPExperts, AutoEPLayer
from moe_conformance.backends.deepspeed.placement import Placement
from moe_conformance.backends.deepspeed.router import ChoiceRouter
from moe_conformance.backends.fsdp_windows import require_one_bias
from moe_conformance.contract import Config, Unsupported

NAME = "autoep"
_SHAPE = ("variant", "experts", "top_k", "hidden", "ffn", "dtype")
_ROUTING = ("routing", "router_dtype", "gate_bias")


class AutoEPParts:
    """The surfaces that AutoEP has."""

    def __init__(
        self, placement: Placement, device: torch.device, engine: Callable[[nn.Module, Config], Any], **settings: Any
    ) -> None:
        """Take what builds an engine around a model, and AutoEP's settings beside its size."""
        self._placement, self._device, self._engine, self._settings = placement, device, engine, settings

    def exchange(self, config: Config) -> AutoEPExchange:
        """Build the layer around a given routing and given experts."""
        config.only(*_SHAPE, "activation", "weights_applied", "padding.packed")
        self._require_own_tokens()
        return AutoEPExchange(config, self._placement, self._device, **self._settings)

    def experts(self, config: Config) -> AutoEPExperts:
        """Build a layer of which the experts alone train, and return these."""
        config.only(*_SHAPE, "activation", "weights_applied")
        self._require_own_tokens()
        layer = autoep_layer(config, self._placement, self._device, **self._settings)
        layer.router.requires_grad_(False)
        return AutoEPExperts(self._engine(layer, config), self._placement.held(config.experts))

    def router(self, config: Config) -> ChoiceRouter:
        """Build its router."""
        config.only(*_SHAPE, *_ROUTING)
        return ChoiceRouter(config, self._device)

    def layer(self, config: Config) -> AutoEPLayer:
        """Build a whole layer, with the shared experts of a model."""
        config.only(*_SHAPE, *_ROUTING, "shared.ffn", "shared.gate", "shared.bias")
        self._require_own_tokens()
        if config.router_dtype not in (None, config.dtype):
            raise Unsupported(f"AutoEP's router has logits of the dtype of its tokens, not of {config.router_dtype}")
        if config.shared.bias:
            require_one_bias(config.shared.ffn)
        layer = autoep_layer(config, self._placement, self._device, **self._settings)
        return AutoEPLayer(self._engine(layer, config), config, self._placement.held(config.experts))

    def built(self, config: Config) -> nn.Module:
        """Build a layer without an engine."""
        self._require_own_tokens()
        layer: nn.Module = autoep_layer(config, self._placement, self._device, **self._settings)
        return layer

    def _require_own_tokens(self) -> None:
        tp = self._placement.topology.sizes["tp"]
        if tp > 1:
            raise Unsupported(f"tp = {tp}: AutoEP folds ep over the tp ranks of an AutoTP model, which is not adapted")


def require_other(config: Config, surface: str) -> None:
    """Refuse a surface that the layer of GShard's kind has, and AutoEP has not.

    Raises:
        Unsupported: it is asked of AutoEP.
    """
    if config.variant == NAME:
        raise Unsupported(f"AutoEP has no {surface}")
