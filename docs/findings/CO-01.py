"""CO-01: the gradient of an expert is the average over those of its replicas that have tokens for it.

Two replicas of one expert; rank 0 has two tokens, rank 1 none, as the blocks call the expert. Exits 1 while the finding
is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPLICAS = 2


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with the gradient of an expert that multiplies, averaged over replicas as the ZeRO optimizer does."""
    warnings.simplefilter("ignore")
    from colossalai.moe._operation import DPGradScalerIn, DPGradScalerOut

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=REPLICAS)
    weight, rows = torch.ones(1, requires_grad=True), torch.ones(2 - 2 * rank, 1)
    active = torch.tensor(float(len(rows) > 0))
    dist.all_reduce(active)
    if len(rows):
        rows = DPGradScalerIn.apply(rows, REPLICAS, active)
        DPGradScalerOut.apply(rows * weight, REPLICAS, active).backward(torch.ones(len(rows), 1))
    grad = torch.zeros(1) if weight.grad is None else weight.grad
    dist.all_reduce(grad)
    answers.put(float(grad) / REPLICAS)
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=REPLICAS, start_method="fork")
    found = answers.get()
    print(f"observed: the average over two replicas of gradients 2 and 0 is {found}")
    print("expected: the average over two replicas of gradients 2 and 0 is 1.0")
    sys.exit(int(found != 1.0))
