"""The library's MoE module as a whole layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_conformance.backends.automodel.experts import expert_windows, require_experts
from moe_conformance.backends.automodel.placement import Model, Placement, backend_config, moe_config
from moe_conformance.backends.automodel.router import gate_windows, require_routed, routing_of
from moe_conformance.backends.fsdp_windows import require_parts, shared_windows, whole_window
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Named, Read, Unsupported


class Layer:
    """A module in a model; several shared experts are one of their total width."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build and place it."""
        from nemo_automodel.components.moe.layers import MoE

        if config.shared.gate and not config.shared.ffn:
            raise Unsupported("the gate of shared experts is one of shared experts, and there are none")
        require_experts(config)
        require_routed(config, placement)
        placement.require_experts(config)
        require_parts(config.shared.ffn, placement.batches)
        if config.shared.ffn:
            placement.require_rows(config.hidden, *((1,) if config.shared.gate else ()))
        moe: Any = MoE(moe_config(config, **routing_of(config)), backend_config(config))
        self._seen = WeightsSeen(moe.gate, 0)
        self._config, self._placement, self._moe = config, placement, moe
        self._model = Model(placement, [moe], experts=True)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts, and how the experts are placed."""
        weight = self._moe.experts.gate_and_up_projs
        return {
            "layer": type(self._moe).__name__,
            "experts": type(self._moe.experts).__name__.removeprefix("FSDP"),
            "shared experts": type(self._moe.shared_experts).__name__,
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
        }

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def train(self, mode: bool = True) -> None:
        """Switch the model."""
        self._model.train(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        (y,) = self._model(_call, (x,))
        result: Tensor = y
        return result

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate, the experts, and of the shared ones the rows that this rank holds."""
        yield from gate_windows(self._moe.gate, read)
        yield from expert_windows(self._moe.experts, self._placement, read)
        shared = self._moe.shared_experts
        if shared is None:
            return
        gate_up_FD = (shared.gate_proj.weight, shared.up_proj.weight)
        yield from shared_windows(gate_up_FD, shared.down_proj, self._config.shared.ffn, read)
        if self._config.shared.gate:
            yield from whole_window("shared_score", self._moe.shared_expert_gate.weight, read)

    def finish(self) -> None:
        """Do what the trainer does after the last backward."""
        self._model.finish()


def _call(moe: Any, x: Tensor) -> Any:
    return moe(x)
