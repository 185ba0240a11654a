"""TT-20: over tp a batch without tokens raises in the router's gate. Exits 1 while the finding is there.

The gate has its weight on every rank of tp and the tokens are sharded by sequence, as `set_moe_sharding_config` has it.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torchtitan.models.common.linear import Linear


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with how the gate takes three tokens a rank, and none."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    gate = distribute_module(Linear.Config(in_features=8, out_features=4).build(), mesh)
    assert all(parameter.placements == (Replicate(),) for parameter in gate.parameters())
    for T in (3, 0):
        x_BTD = DTensor.from_local(torch.randn(1, T, 8), mesh, [Shard(1)])
        try:
            gate(x_BTD)
            answers.put((rank, T, "returns"))
        except RuntimeError as error:
            answers.put((rank, T, f"raises: {str(error).split('.')[0]}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = {(rank, T): how for rank, T, how in (answers.get() for _ in range(4))}
    print("observed: " + "; ".join(f"{T} tokens a rank: {found[0, T]}" for T in (3, 0)))
    print("expected: 3 tokens a rank: returns; 0 tokens a rank: returns")
    sys.exit(int(set(found.values()) != {"returns"}))
