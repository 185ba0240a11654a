"""TF-22: training fails after a first forward in inference mode, where FSDP2 shards the experts.

Two ranks that replicate the experts. Exits 1 while the finding is there.
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
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with how a training step ends, after a forward under no_grad and after one in inference mode."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, x, ids = dist.init_device_mesh("cpu", (2,)), torch.ones(4, 32), torch.tensor([[0], [1], [2], [3]])
    for without_gradients in (torch.no_grad, torch.inference_mode):
        config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4)
        config._experts_implementation = "eager"
        experts = Qwen3MoeExperts(config)
        fully_shard(experts, mesh=mesh, reshard_after_forward=True)
        with without_gradients():
            experts(x, ids, torch.ones(4, 1))
        try:
            experts(x.clone().requires_grad_(), ids, torch.ones(4, 1)).sum().backward()
            answers.put((rank, without_gradients.__name__, "works"))
        except RuntimeError as error:
            answers.put((rank, without_gradients.__name__, f"raises: {str(error).split('.')[0]}"))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = {(rank, mode): text for rank, mode, text in (answers.get() for _ in range(4))}
    no_grad, inference = found[0, "no_grad"], found[0, "inference_mode"]
    print(f"observed: after no_grad training {no_grad}; after inference mode it {inference}")
    print("expected: after no_grad training works; after inference mode it works")
    sys.exit(int(set(found.values()) != {"works"}))
