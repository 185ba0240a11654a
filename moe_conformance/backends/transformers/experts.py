"""Experts of a model, sharded as the library shards them: whole experts over ep, their replicas by FSDP2 over edp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.router import ONE_HEAD
from moe_conformance.contract import Config, Delivery, Named, Read

_PARAMETERS = ("gate_up_proj", "down_proj")


class ShardedExperts:
    """Qwen3-MoE's experts. Every backward reduces, as the library's training does without further settings."""

    def __init__(self, config: Config, placement: Placement, implementation: str) -> None:
        """Build all E experts, keep this rank's N, and shard these over their replicas."""
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        asked = Qwen3MoeConfig(
            hidden_size=config.hidden, moe_intermediate_size=config.ffn, num_experts=config.experts, **ONE_HEAD
        )
        asked._experts_implementation = implementation
        module: Any = Qwen3MoeExperts(asked).to(placement.device, config.dtype)
        self._module, self._placement = module, placement
        mesh = placement.expert_mesh
        self._style, self._ep_mesh = EpDispatchExpertsParallel(), mesh["ep"]
        for name in _PARAMETERS if mesh["ep"].size() > 1 else ():
            MoEParamShard(Shard(0), shards_expert_dim=True).shard_param(module, name, self._ep_mesh)
        self._experts_forward = module.forward
        module.forward = self._on_local_parameters
        if placement.batches > 1:
            self._shard(mesh["efsdp"])

    def _shard(self, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        # As the library does it in apply_fully_sharded_data_parallelism, which wants a whole model.
        module: Any = fully_shard(self._module, mesh=mesh, reshard_after_forward=True)
        module.set_gradient_divide_factor(float(self._placement.batches))
        if mesh.size() > 1:
            module.set_force_sum_reduction_for_comms(True)

    def _on_local_parameters(self, *handed: Tensor) -> Tensor:
        with self._style.context_around_forward(self._module, self._ep_mesh):
            answer: Tensor = self._experts_forward(*handed)
        return answer

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, how it multiplies, and how its parameters are placed."""
        weight = self._module.gate_up_proj
        return {
            "experts": type(self._module).__name__,
            "experts implementation": self._module.config._experts_implementation,
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the weighted output; N stands for another rank's expert, as the implementations write it."""
        ids_RJ = torch.where(delivery.ids_RJ < 0, self._placement.held, delivery.ids_RJ)
        out_RD: Tensor = self._module(delivery.rows_RD, ids_RJ, delivery.weights_RJ)
        return out_RD

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the three matrices of every expert in this rank's shard; gate and up lie in one parameter."""
        first = self._first_kept()
        for n, gate_up in enumerate(read(_local(self._module.gate_up_proj))):
            gate, up = gate_up.chunk(2)
            yield Named("gate", first + n, gate)
            yield Named("up", first + n, up)
        for n, down in enumerate(read(_local(self._module.down_proj))):
            yield Named("down", first + n, down)

    def _first_kept(self) -> int:
        """Return the first expert of this rank's shard: of its N experts FSDP2 keeps one chunk per replica."""
        edp = self._placement.topology.ranks("edp")
        chunk = -(-self._placement.held // len(edp))
        return self._placement.first + edp.index(self._placement.topology.rank) * chunk


def _local(parameter: Tensor) -> Tensor:
    """Return the plain tensor under a sharded parameter, its gradient's under `grad`."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        local: Tensor = parameter.to_local()
        local.grad = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
    return local
