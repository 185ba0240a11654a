"""The library's grouped experts of one rank, which FSDP2 shards over their replicas. F intermediate size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_conformance.backends.torchtitan import replicas
from moe_conformance.backends.torchtitan.layer import CANONICAL, expert_windows
from moe_conformance.contract import Config, Delivery, Named, Read, Topology, Unsupported


def require_rows(config: Config) -> None:
    """Refuse sizes that the experts' matrix product does not take."""
    for size in (config.hidden, config.ffn):
        if size % 8:
            raise Unsupported(f"torch's grouped matmul needs rows of a multiple of 8 bfloat16, not {size}")


class Experts:
    """GroupedExperts of this rank's N experts, under FSDP2 where edp > 1.

    Microbatches accumulate without reduction until `reduce`.
    """

    names: ClassVar[Mapping[str, str]] = CANONICAL

    def __init__(self, config: Config, first: int, held: int, topology: Topology, device: torch.device) -> None:
        """Build and shard them; collective where edp > 1."""
        self._first, self._topology, self._device = first, topology, device
        self._edp = topology.ranks("edp")
        self._module: nn.Module = self.built(config, held).to(
            device, torch.float32 if len(self._edp) > 1 else config.dtype
        )
        if len(self._edp) > 1:
            self._shard(config)

    def built(self, config: Config, held: int) -> nn.Module:
        """Return the module of N experts."""
        from torchtitan.models.common.moe import GroupedExperts

        module: nn.Module = GroupedExperts.Config(dim=config.hidden, hidden_dim=config.ffn, num_experts=held).build()
        return module

    def _shard(self, config: Config) -> None:
        mesh = DeviceMesh.from_group(self._topology.group("edp"), self._device.type, mesh_dim_names=("efsdp",))
        # As in the library: by expert, or within the experts where there are more ranks than experts.
        within = len(self._edp) * len(self._topology.ranks("ep")) > config.experts
        replicas.shard(self._module, mesh, config.dtype, dim=1 if within else 0)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, the type of its parameters and how they are sharded."""
        weight = next(self._module.parameters())
        return {
            "experts": type(self._module).__qualname__,
            "parameters": str(weight.dtype),
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output of every row."""
        assert delivery.counts_N is not None  # the dispatchers count
        out_RD: Tensor = self._module(delivery.rows_RD, delivery.counts_N.to(delivery.rows_RD.device))
        return out_RD

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the three matrices of every expert, as far as they are on this rank."""
        return expert_windows(self._module, self._first, read, self.names)

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._module

    def reshard(self) -> None:
        """Free the gathered parameters, which FSDP2 is configured to keep."""
        if len(self._edp) > 1:
            module: Any = self._module
            module.reshard()

    def reduce(self) -> None:
        """Reduce gradients as the pipeline schedules do after the last backward."""
        if len(self._edp) > 1:
            replicas.reduce(self._module, self._topology, self._device)
