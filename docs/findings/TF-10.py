"""TF-10: invalid input on one rank leaves the others waiting.

Two ranks and an all-to-all: correct input first, then an id of E on rank 1. Exits 1 while the finding is there.
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
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


def run(rank: int, store: str, answers: Any, end: Any) -> None:
    """Answer with how the second forward ends; gloo waits for five seconds."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=2)
    config._experts_implementation = "eager"
    exchange = AllToAllEP(Qwen3MoeExperts(config), mesh["ep"], mesh["tp"])
    x, weights = torch.randn(6, 32), torch.full((6, 2), 0.5)
    ids = torch.stack([torch.arange(6) % 4, (torch.arange(6) + 1) % 4], 1)
    with torch.no_grad():
        exchange(x, ids, weights)
        try:
            exchange(x, ids + 4 * rank * (ids == 0), weights)
            answers.put((rank, "returns"))
        except RuntimeError as error:
            answers.put((rank, "waits" if "Timed out" in str(error) else f"raises: {error}"))
    end.wait(10)  # a rank that ended at once would end the other's waiting


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found = dict(answers.get() for _ in range(2) if not answers.empty())
    print(f"observed: rank 1 {found.get(1)}; rank 0 {found.get(0)}")
    print("expected: both ranks raise")
    sys.exit(int(found.get(0) == "waits"))
