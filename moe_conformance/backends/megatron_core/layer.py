"""A whole MoELayer as a surface, with its shared experts. F is the width of all shared experts together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.backends.megatron_core.surfaces import WEIGHTS, wrapped
from moe_conformance.backends.weights_seen import WeightsSeen
from moe_conformance.contract import Claims, Config, Named, Read, Topology, Unsupported


class Layer:
    """The layer as a model has it, in Megatron's DistributedDataParallel.

    Several shared experts are one of their total width. In the part of a tp rank lie parts of all of them in order.
    """

    def __init__(self, layer: Any, config: Config, topology: Topology, chunk: Any = None) -> None:
        """Wrap the layer, or take the wrapped model that it is part of.

        Raises:
            Unsupported: a shared expert's width does not divide over tp.
        """
        self._layer, self._config = layer, config
        self._etp, self._tp = _place(topology, "etp"), _place(topology, "tp")
        if odd := [width for width in config.shared.ffn if width % self._tp[1]]:
            raise Unsupported(f"a shared expert of width {odd[0]} has no equal parts on tp = {self._tp[1]}")
        self._seen = WeightsSeen(layer.router, WEIGHTS)
        self.chunk = wrapped(layer, layer.config) if chunk is None else chunk

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts, whether shared experts overlap with the dispatcher, and the dtype of scores."""
        return {
            "layer": type(self._layer).__qualname__,
            "dispatcher": type(self._layer.token_dispatcher).__qualname__,
            "experts": type(self._layer.experts).__qualname__,
            "shared experts": type(self._layer.shared_experts).__qualname__,
            "shared overlap": str(self._layer.shared_expert_overlap),
            "shims": "; ".join(library.SHIMS) or "none",
        }

    @property
    def claims(self) -> Claims:
        """The dtype of scores, as far as it was seen."""
        return Claims(dtype=self._seen.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output; it takes [sequence, batch, D], and rows without a batch are a batch of one."""
        y: Tensor = self.chunk(x if x.dim() == 3 else x.unsqueeze(1))[0]
        return y if x.dim() == 3 else y.squeeze(1)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate of the router, the experts, the shared experts and their gate."""
        yield Named("router", None, read(self._layer.router.weight))
        if self._layer.router.expert_bias is not None:
            yield Named("balance_bias", None, read(self._layer.router.expert_bias))
        for expert, (fc1, fc2) in zip(self._layer.local_expert_indices, _matrices(self._layer.experts), strict=True):
            gate_FD, up_FD = read(fc1).chunk(2, 0)
            yield Named("gate", expert, gate_FD, (0, *self._etp))
            yield Named("up", expert, up_FD, (0, *self._etp))
            yield Named("down", expert, read(fc2), (1, *self._etp))
        if self._layer.shared_experts is not None:
            yield from self._shared(self._layer.shared_experts, read)

    def _shared(self, shared: Any, read: Read) -> Iterator[Named]:
        gate_FD, up_FD = read(shared.linear_fc1.weight).chunk(2, 0)
        down_DF, start = read(shared.linear_fc2.weight), 0
        for j, width in enumerate(self._config.shared.ffn):
            units = slice(start, start + width // self._tp[1])
            yield Named("shared_gate", j, gate_FD[units], (0, *self._tp))
            yield Named("shared_up", j, up_FD[units], (0, *self._tp))
            yield Named("shared_down", j, down_DF[:, units], (1, *self._tp))
            start = units.stop
        if shared.gate_weight is not None:
            yield Named("shared_score", None, read(shared.gate_weight))


def _matrices(experts: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the stacked gate and up projection and the down projection of every expert of this rank."""
    for i in range(experts.num_local_experts):
        if hasattr(experts, "local_experts"):  # SequentialMLP
            yield experts.local_experts[i].linear_fc1.weight, experts.local_experts[i].linear_fc2.weight
        else:  # TEGroupedMLP
            yield getattr(experts.linear_fc1, f"weight{i}"), getattr(experts.linear_fc2, f"weight{i}")


def _place(topology: Topology, group: str) -> tuple[int, int]:
    ranks = topology.ranks(group)
    return ranks.index(topology.rank), len(ranks)
