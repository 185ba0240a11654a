"""DS-06: with a token drop, ranks with other numbers of tokens have other capacities.

Two ranks with 8 and 2 tokens. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed import comm
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups


def run(rank: int, store: str, answers: Any, end: Any) -> None:
    """Answer with the capacity of this rank, and with what becomes of a forward; gloo waits for five seconds."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # DS-07
    comm.init_distributed("gloo")
    groups._create_expert_and_data_parallel(2)
    torch.manual_seed(0)
    layer = MoE(8, torch.nn.Linear(8, 8), 4, ep_size=2, k=2, min_capacity=0, capacity_factor=1.0)
    layer.set_deepspeed_parallelism()
    x = torch.randn(8 if rank == 0 else 2, 8)
    answers.put((rank, f"C = {int(layer.deepspeed_moe.gate(x, None, True)[1])}"))
    end.wait(10)
    try:
        layer(x)[0].sum().item()
        answers.put((rank, "returns"))
    except RuntimeError:
        pass  # what the other rank sent does not fit
    end.wait(10)  # a rank that ended at once would end the other's waiting


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found: dict[int, list[str]] = {0: [], 1: []}
    while not answers.empty():
        rank, word = answers.get()
        found[rank].append(word)
    print("observed: 8 and 2 tokens:", "; ".join(f"rank {rank}: {', '.join(words)}" for rank, words in found.items()))
    print("expected: 8 and 2 tokens: both ranks have the same C, and return")
    sys.exit(int(any("returns" not in words for words in found.values())))
