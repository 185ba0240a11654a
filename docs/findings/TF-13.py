"""TF-13: a rank without tokens reduces other sizes than its peers, with eager experts.

A Qwen2-MoE block on two data parallel ranks, the second without tokens. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeSparseMoeBlock


def run(rank: int, store: str, implementation: str, done: Any) -> None:
    """Run a forward and a backward, and say that they have ended."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    config = Qwen2MoeConfig(
        hidden_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = implementation
    block = Qwen2MoeSparseMoeBlock(config)
    fully_shard(block, mesh=dist.init_device_mesh("cpu", (2,)))
    block(torch.randn(1, 6 - 6 * rank, 32)).sum().backward()
    done.put(rank)


def both_return(implementation: str) -> bool:
    """Return whether both ranks end their backward."""
    done = multiprocessing.get_context("fork").SimpleQueue()
    arguments = (tempfile.mktemp(), implementation, done)
    ranks = mp.start_processes(run, arguments, nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    return sum(not done.empty() and done.get() >= 0 for _ in range(2)) == 2


if __name__ == "__main__":
    eager, grouped = both_return("eager"), both_return("grouped_mm")
    config = Qwen2MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4)
    config._experts_implementation = "eager"
    none = Qwen2MoeExperts(config)(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    print(f"observed: the output of eager experts of no tokens requires grad: {none.requires_grad}")
    print(f"observed: the backward returns on both ranks with eager experts: {eager}, with grouped_mm: {grouped}")
    print("expected: the output of eager experts of no tokens requires grad: True")
    print("expected: the backward returns on both ranks with eager experts: True, with grouped_mm: True")
    sys.exit(int(not (eager and grouped and none.requires_grad)))
