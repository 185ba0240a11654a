"""The library's MoE layer as a whole, with its gate and experts, in an engine. D hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from moe_conformance.backends.deepspeed import library
from moe_conformance.backends.deepspeed.experts import windows
from moe_conformance.backends.deepspeed.placement import Placement
from moe_conformance.backends.deepspeed.router import claims_of_gate
from moe_conformance.backends.shared_batch import SharedBatch
from moe_conformance.contract import Claims, Config, Named, Read


class Layer:
    """A MoE layer, whose tensor ranks hold the same tokens: the adapter gathers them.

    It is called without its engine, whose outputs refuse any backward but the engine's own, of a scalar loss.
    """

    def __init__(self, engine: Any, config: Config, placement: Placement) -> None:
        """Take the engine of a layer."""
        self.engine, self._config, self._placement = engine, config, placement
        self._held = placement.held(config.experts)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts, and the size of the group of experts."""
        layer = self.engine.module.deepspeed_moe
        return {
            "layer": type(self.engine.module).__qualname__,
            "gate": type(layer.gate).__qualname__,
            "experts": type(layer.experts).__qualname__,
            "ep ranks": str(layer.ep_size),
            "tutel": str(layer.use_tutel),
            "shims": library.SHIMS,
        }

    @property
    def claims(self) -> Claims:
        """Its gate computes in float32."""
        return claims_of_gate(self._config.top_k, jitter=self._config.jitter > 0)

    def train(self, mode: bool = True) -> None:
        """Switch the layer."""
        self.engine.train(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Return y of this rank's tokens; tensor ranks share a batch."""
        group = self._placement.topology.group("tp")
        if group.size() == 1:
            y: Tensor = self.engine.module(x)[0]
            return y
        x_TD = x.reshape(-1, x.shape[-1])
        batch = SharedBatch(len(x_TD), group, x.device)
        return batch.local_rows(self.engine.module(batch.of_all(x_TD))[0]).reshape(x.shape)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate's weight and the matrices of this rank's experts."""
        yield Named("router", None, read(self.engine.module.deepspeed_moe.gate.wg.weight))
        yield from windows(self.engine.module, self._held, read)
