"""AutoEP's grouped experts and its whole layer, in an engine, which reduces their gradients. D hidden, R rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from moe_conformance.backends.deepspeed.autoep import resolved
from moe_conformance.backends.fsdp_windows import shared_windows
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Delivery, Named, Read


def grouped_windows(experts: Any, held: range, read: Read) -> Iterator[Named]:
    """Yield the three matrices of every expert of this rank."""
    for name, parameter in (("gate", experts.w1), ("up", experts.w3), ("down", experts.w2)):
        for expert, view in zip(held, read(parameter), strict=True):
            yield Named(name, expert, view)


class AutoEPExperts:
    """The GroupedExperts of AutoEP's layer, one after the other: what they have for products of all needs a GPU."""

    def __init__(self, engine: Any, held: range) -> None:
        """Take the engine of a layer."""
        self.engine, self._held = engine, held
        self.module: nn.Module = engine.module.experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the experts, their activation, the type of their parameters and of reduced gradients."""
        experts: Any = self.module
        return {
            "experts": type(experts).__qualname__,
            "activation": getattr(experts, "activation", "swiglu"),
            "parameters": str(experts.w1.dtype),
            "reduced in": str(self.engine.communication_data_type),
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output of every row."""
        assert delivery.counts_N is not None  # the layer counts
        out_RD: Tensor = self.module(delivery.rows_RD, delivery.counts_N)
        return out_RD

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the three matrices of every expert."""
        return grouped_windows(self.module, self._held, read)


class AutoEPLayer:
    """AutoEP's layer.

    It is called without its engine, whose outputs refuse any backward but the engine's own, of a scalar loss.
    """

    said: Mapping[str, str] = MappingProxyType({})  # further words for what was built

    def __init__(self, engine: Any, config: Config, held: range) -> None:
        """Take the engine of a layer."""
        self.engine, self._config, self._held = engine, config, held
        self._seen = WeightsSeen(engine.module.router, 0)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts."""
        layer = self.engine.module
        shared = "none" if layer.shared_experts is None else f"of the model, {sum(self._config.shared.ffn)} wide"
        parts = {"router": type(layer.router).__qualname__, "experts": type(layer.experts).__qualname__}
        return {**resolved(layer), **parts, "shared experts": shared, **self.said}

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def train(self, mode: bool = True) -> None:
        """Switch the layer."""
        self.engine.train(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Return y; the layer takes [batch, sequence, D]."""
        y: Tensor = self.engine.module(x if x.dim() == 3 else x[None])
        return y.reshape(x.shape)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router with its biases, this rank's experts and the shared ones."""
        layer = self.engine.module
        yield Named("router", None, read(layer.router.gate.weight))
        if layer.router.gate.bias is not None:
            yield Named("gate_bias", None, read(layer.router.gate.bias))
        if self._config.routing.balance_bias:
            yield Named("balance_bias", None, read(layer.router.e_score_correction_bias))
        yield from grouped_windows(layer.experts, self._held, read)
        if layer.shared_experts is not None:
            shared = layer.shared_experts
            gate_up_FD = (shared.gate.weight, shared.up.weight)
            yield from shared_windows(gate_up_FD, shared.down, self._config.shared.ffn, read)
        if layer.shared_experts_gate is not None:
            yield Named("shared_score", None, read(layer.shared_experts_gate.weight))
