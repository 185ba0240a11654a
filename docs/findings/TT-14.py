"""TT-14: training fails after a first forward in inference mode, where FSDP2 shards the experts and keeps them whole.

Two ranks that replicate the experts, placed as torchtitan places them under pipeline schedules. Exits 1 while the
finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.models.common.moe import GroupedExperts


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with how a training step ends, after a forward under no_grad and after one in inference mode."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, counts = dist.init_device_mesh("cpu", (2,)), torch.tensor([3, 3])
    for without_gradients in (torch.no_grad, torch.inference_mode):
        experts = GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=2).build()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(experts, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        with without_gradients():
            experts(torch.ones(6, 8, dtype=torch.bfloat16), counts)
        try:
            x = torch.ones(6, 8, dtype=torch.bfloat16, requires_grad=True)
            experts(x, counts).backward(torch.ones_like(x))
            answers.put((rank, without_gradients.__name__, "works"))
        except RuntimeError as error:
            answers.put((rank, without_gradients.__name__, f"raises: {str(error).split('. ')[0]}"))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = {(rank, mode): text for rank, mode, text in (answers.get() for _ in range(4))}
    no_grad, inference = found[0, "no_grad"], found[0, "inference_mode"]
    print(f"observed: after no_grad training {no_grad}; after inference mode it {inference}")
    print("expected: after no_grad training works; after inference mode it works")
    sys.exit(int(set(found.values()) != {"works"}))
