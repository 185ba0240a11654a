"""TF-01: AllReduceEP deadlocks in backward when a rank's experts receive no token.

Two ranks with the same tokens, two experts each; all tokens are routed to rank 0. Exits 1 while the finding is there.
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
from transformers.distributed.expert_parallel import AllReduceEP
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


def run(rank: int, store: str, answers: Any, end: Any) -> None:
    """Answer with how the backward ends; gloo waits for five seconds."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=2)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config)
    x = torch.randn(6, 32, requires_grad=True)
    exchange, ids, weights = AllReduceEP(experts, mesh, mesh), torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    none = exchange(x[:0], ids[:0], weights[:0])
    answers.put((rank + 2, none.requires_grad))
    y = exchange(x, ids, weights)
    try:
        (x + y).sum().backward()  # the residual connection: x has a graph of its own
        answers.put((rank, f"output requires grad: {y.requires_grad}, backward returns"))
    except RuntimeError:
        answers.put((rank, f"output requires grad: {y.requires_grad}, backward waits"))
    end.wait(10)  # a rank that ended at once would end the other's waiting


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found = dict(answers.get() for _ in range(4) if not answers.empty())
    right = "output requires grad: True, backward returns"
    print(f"observed: the output of no tokens requires grad: {found.get(2)} on rank 0, {found.get(3)} on rank 1")
    print(f"observed: rank 0: {found.get(0)}; rank 1: {found.get(1)}")
    print("expected: the output of no tokens requires grad: True on rank 0, True on rank 1")
    print(f"expected: rank 0: {right}; rank 1: {right}")
    sys.exit(int(found != {0: right, 1: right, 2: True, 3: True}))
