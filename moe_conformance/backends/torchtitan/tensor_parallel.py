"""torchtitan's MoE module over tp, with sequence parallelism: `Module.parallelize` with its own sharding configs.

Every rank of tp has tokens of its own. Where experts are spread over exactly the ranks of tp, data parallel ranks
replicate (HSDP, `dp_replicate`), so that a shared expert is cut by tp alone; elsewhere FSDP2 cuts it too, along another
dimension, and a window cannot be on such a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.backends.fsdp_windows import local, parts_of, require_parts
from moe_conformance.contract import Config, Named, Read, Topology, Unsupported


@dataclass(frozen=True)
class Meshes:
    """The library's description of the layout, and the meshes over which FSDP2 shards all else and experts."""

    dims: Any  # ParallelDims
    data: DeviceMesh
    experts: DeviceMesh
    made: tuple[dist.ProcessGroup, ...] = ()  # groups that the caller has to destroy


def replicates(topology: Topology) -> bool:
    """Whether data parallel ranks replicate parameters: experts are spread over exactly the ranks of tp."""
    sizes = topology.sizes
    return sizes["cp"] == 1 and sizes["tp"] == sizes["ep"]


def require_over_tp(config: Config, topology: Topology) -> None:
    """Refuse layouts and sizes of which no window is on a rank's part."""
    sizes = topology.sizes
    if sizes["ep"] == 1 or sizes["ep"] < sizes["tp"] * sizes["cp"]:
        raise Unsupported(f"tp = {sizes['tp']} with ep = {sizes['ep']}: experts are cut by more than ep, not adapted")
    if config.shared.gate:
        raise Unsupported("the gate of shared experts is placed over tp by Qwen3.5 alone, whose module needs fla")
    if config.shared.ffn and not replicates(topology):
        raise Unsupported("a shared expert is cut along F by tp and along D by FSDP2, of which no window is")
    if not replicates(topology) and config.experts % (sizes["dp"] * sizes["cp"]):
        raise Unsupported(f"FSDP2 cuts {config.experts} rows of the gate into unequal parts")
    require_parts(config.shared.ffn, sizes["tp"])


def set_sharding(module: Any) -> None:
    """Set the sharding configs of an MoE module's config, as DeepSeek-V3 and Qwen3 do."""
    import spmd_types as spmd
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(module, enable_ep=True, enable_sp=True, expert_param_layout=layout)


def meshes(topology: Topology, device: torch.device) -> Meshes:
    """Return the meshes of the library on the suite's groups."""
    from torchtitan.distributed import ParallelDims

    sizes, copies = topology.sizes, replicates(topology)
    made: tuple[dist.ProcessGroup, ...] = ()
    stage = torch.tensor(sorted(_stage(topology)))
    if copies:
        names: tuple[str, ...] = ("dp_replicate", "fsdp", "tp")
        dense = _mesh(stage, [topology.group(axis) for axis in ("dp", "cp", "tp")], device, names)
        # FSDP2 takes no group for two meshes, and the suite has one group of this rank alone.
        made = (dist.new_group([topology.rank], use_local_synchronization=True),)
        groups = [topology.group("edp"), *made, topology.group("ep")]
        sparse = _mesh(stage, groups, device, ("dp_replicate", "efsdp", "ep"))
    else:
        dense = _mesh(stage, [topology.group("dp_cp"), topology.group("tp")], device, ("fsdp", "tp"))
        sparse = _mesh(stage, [topology.group("edp"), topology.group("ep")], device, ("efsdp", "ep"))
    dims: Any = ParallelDims(
        dp_replicate=sizes["dp"] if copies else 1,
        dp_shard=1 if copies else sizes["dp"],
        cp=sizes["cp"],
        tp=sizes["tp"],
        pp=sizes["pp"],
        ep=sizes["ep"],
        world_size=sizes["world"],
        spmd_backend="partial_dtensor",
    )
    dims._single_axis_meshes = {"tp": dense["tp"], "ep": sparse["ep"]}
    kept = ("dp_replicate",) if copies else ()
    return Meshes(dims, dense[(*kept, "fsdp")], sparse[(*kept, "efsdp")], made)


def _stage(topology: Topology) -> set[int]:
    """Return the ranks of this rank's pipeline stage, which are in a row."""
    size = topology.sizes["world"] // topology.sizes["pp"]
    first = topology.rank // size * size
    return set(range(first, first + size))


def _mesh(
    stage: Tensor, groups: Sequence[dist.ProcessGroup], device: torch.device, names: tuple[str, ...]
) -> DeviceMesh:
    """Return the mesh of a stage's ranks on groups along its axes, of which the last varies fastest."""
    shape = [group.size() for group in groups]
    return DeviceMesh.from_group(list(groups), device.type, mesh=stage.reshape(shape), mesh_dim_names=names)


def shared_windows_over_tp(shared: Any, config: Config, topology: Topology, read: Read) -> Iterator[Named]:
    """Yield the windows on shared experts that lie in one, of which a rank of tp holds equal parts along F."""
    tp = topology.ranks("tp")
    width = sum(config.shared.ffn) // len(tp)
    start = tp.index(topology.rank) * width
    cut = parts_of(range(start, start + width), config.shared.ffn)
    for name, linear in (("shared_gate", shared.w1), ("shared_up", shared.w3)):
        view = read(local(linear.weight))
        for j, units, part in cut:
            yield Named(name, j, view[units], part)
    down = read(local(shared.w2.weight))
    for j, units, part in cut:
        yield Named("shared_down", j, down[:, units], None if part is None else (1, *part[1:]))
    if shared.w2.bias is not None:
        yield Named("shared_bias", 0, read(local(shared.w2.bias)))
