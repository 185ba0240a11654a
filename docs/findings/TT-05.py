"""TT-05: defaults that do not run over gloo: an all-to-all with unequal splits, and FSDP2 without division.

Two ranks: of three tokens on each, two are for the expert of rank 1. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.spmd_types import set_current_spmd_mesh, set_spmd_meshes
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with how a dispatch and a sharded backward end."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=2, top_k=1).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    ids = torch.tensor([[0], [1], [1]])
    try:
        with set_current_spmd_mesh(mesh):
            dispatcher.dispatch(torch.randn(3, 8), torch.ones(3, 1), ids, torch.tensor([1, 2]))
        answers.put((rank, "works"))
    except RuntimeError as error:
        answers.put((rank, f"raises: {str(error).splitlines()[0]}"))
    layer = torch.nn.Linear(2, 2)
    fully_shard(layer, mesh=mesh)
    disable_fsdp_gradient_division(layer)
    try:
        layer(torch.ones(1, 2)).sum().backward()
        answers.put((rank, "works"))
    except RuntimeError as error:
        answers.put((rank, f"raises: {str(error).splitlines()[0]}"))
    dist.all_reduce(torch.ones(1))  # ends together; gloo's barrier would wait for the work that failed, and raise again


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    dispatch, backward = [text for rank, text in (answers.get() for _ in range(4)) if rank == 0]
    print(f"observed: over gloo the dispatch {dispatch}; the backward of FSDP2 {backward}")
    print("expected: over gloo the dispatch works; the backward of FSDP2 works")
    sys.exit(int((dispatch, backward) != ("works", "works")))
