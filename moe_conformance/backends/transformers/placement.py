"""The library's meshes of a rank, and the layouts that it refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.contract import Config, Topology, Unsupported, refusals


class Placement:
    """The meshes of one rank, made of the suite's groups, and the experts that it holds."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Ask the library for the layout.

        Raises:
            Unsupported: the library refuses the sizes (proved), or has no words for them.
        """
        sizes = topology.sizes
        self.batches = sizes["cp"] * sizes["dp"]  # the library's dp_size: tensor ranks share a batch
        self.distributed_config = _ask(sizes["tp"], self.batches, sizes["pp"], sizes["ep"])
        if sizes["etp"] > 1:
            raise Unsupported(f"etp = {sizes['etp']}: transformers has no size for splitting experts in addition to ep")
        if sizes["tp"] > 1 and sizes["ep"] == 1:
            raise Unsupported(f"tp = {sizes['tp']} with ep = 1 splits every expert over tensor ranks by a tp plan")
        if config.experts < 1 or config.experts % sizes["ep"]:
            raise Unsupported(f"every rank holds the same number of experts: {config.experts} on ep = {sizes['ep']}")
        self.topology, self.device = topology, device
        self.held = config.experts // sizes["ep"]  # N
        self.first = topology.ranks("ep").index(topology.rank) * self.held

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The ranks that share a batch."""
        return DeviceMesh.from_group(self.topology.group("tp"), self.device.type, mesh_dim_names=("tp",))

    @property
    def dense_mesh(self) -> DeviceMesh:
        """The ranks with different batches, over which all parameters but those of experts are sharded."""
        return DeviceMesh.from_group(self.topology.group("dp_cp"), self.device.type, mesh_dim_names=("fsdp",))

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The axes efsdp and ep; with pp and etp of one they are all of the world, ep counting fastest."""
        ep, edp = self.topology.sizes["ep"], self.topology.sizes["edp"]
        return DeviceMesh.from_group(
            [self.topology.group("edp"), self.topology.group("ep")],
            self.device.type,
            mesh=torch.arange(edp * ep).reshape(edp, ep),
            mesh_dim_names=("efsdp", "ep"),
        )


def _ask(tp: int, batches: int, pp: int, ep: int) -> Any:
    from transformers.distributed import DistributedConfig

    with refusals(ValueError, match="must be a multiple of `tp_size`|must divide|is not supported yet"):
        return DistributedConfig(tp_size=tp, fsdp_size=batches, pp_size=pp, ep_size=ep)
