"""The rank lists of the meshes that torchtitan's `ParallelDims` builds, for sizes that pass its checks.

Data parallelism is `dp_shard`, the default. Experts have no tensor parallelism of their own beside expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import device_mesh

from moe_conformance.contract import Unsupported, refusals

RankLists = tuple[tuple[int, ...], ...]

# The suite's names: the mesh, and the names of its dimension in it. Where cp folds into data parallelism is "fsdp".
_FOUND = {
    "tp": ("dense", "tp"),
    "cp": ("dataloading", "cp"),
    "pp": ("dense", "pp"),
    "dp": ("dataloading", "batch"),
    "dp_cp": ("dense", "fsdp"),
    "ep": ("sparse", "ep"),
    "ep_etp": ("sparse", "ep"),
    "edp": ("sparse", "efsdp"),
    "expert_pp": ("sparse", "pp"),
}


def rank_lists(sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
    """Return the lists of every group along an axis of the three meshes.

    Raises:
        Unsupported: by the library, where it refuses the sizes.
    """
    from torchtitan.distributed import parallel_dims

    if sizes["etp"] != 1:
        raise Unsupported(f"etp = {sizes['etp']}: torchtitan's ParallelDims has no size for it")
    refused = "Invalid parallel dims|Parallelism degree should be|dp_shard must|product of|must be positive"
    with refusals(AssertionError, ValueError, RuntimeError, ZeroDivisionError, match=refused):
        dims = parallel_dims.ParallelDims(
            dp_replicate=1,
            dp_shard=-1,
            cp=sizes["cp"],
            tp=sizes["tp"],
            pp=sizes["pp"],
            ep=sizes["ep"],
            world_size=sizes["world"],
            spmd_backend="partial_dtensor",
        )
        with _without_groups(parallel_dims, sizes["world"]):
            dims.build_mesh()
    meshes: Mapping[str, Any] = dims._global_meshes
    found = {name: _along(meshes[mesh].mesh, meshes[mesh].mesh_dim_names, dim) for name, (mesh, dim) in _FOUND.items()}
    ranks = range(sizes["world"])
    return {"world": (tuple(ranks),), "etp": tuple((rank,) for rank in ranks)} | found


def _along(mesh: Tensor, names: Sequence[str], dim: str) -> RankLists:
    """Return the lists of ranks that differ along one dimension of a mesh alone."""
    rows = mesh.movedim(names.index(dim), -1).flatten(0, -2)
    return tuple(tuple(row) for row in rows.tolist())


@contextmanager
def _without_groups(parallel_dims: Any, world: int) -> Iterator[None]:
    """Have meshes built of a simulated world, without process groups."""

    def init_device_mesh(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> Any:
        del device
        mesh: Any = device_mesh.DeviceMesh(
            "cpu", torch.arange(world).reshape(shape), mesh_dim_names=mesh_dim_names, _init_backend=False, _rank=0
        )
        mesh._dim_group_names = ["world"]
        return mesh

    def init_process_groups(layout: Any, ranks: Tensor, names: tuple[str, ...], override: Any = None) -> list[str]:
        del layout, ranks, override
        return list(names)

    with (
        patch.object(parallel_dims, "init_device_mesh", init_device_mesh),
        patch.object(device_mesh, "get_rank", lambda: 0),
        patch.object(device_mesh, "_resolve_process_group", lambda name: None),
        patch.object(device_mesh.DeviceMesh, "_setup_world_group_and_device", lambda mesh: None),
        patch.object(device_mesh.DeviceMesh, "_init_process_groups", staticmethod(init_process_groups)),
    ):
        yield
