"""TU-01: in a group that is a part of the world, the backward of all_to_all is one over the world.

Four ranks, groups (0, 1) and (2, 3), four experts, a place each. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tutel import net


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with the gradient of rows that go to the other rank of the group, where it is their receiver's rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rows_ECD = torch.zeros(4, 1, 1, requires_grad=True)
    net.all_to_all(rows_ECD, 1, 0, group=groups[rank // 2]).backward(torch.full((2, 2, 1), float(rank)))
    answers.put((rank, rows_ECD.grad.flatten().tolist()))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=4, start_method="fork")
    found = dict(answers.get() for _ in range(4))
    print("observed: the gradients of rows for experts 0 to 3 of rank 0 come from ranks", found[0])
    print("expected: the gradients of rows for experts 0 to 3 of rank 0 come from ranks [0.0, 0.0, 1.0, 1.0]")
    sys.exit(int(found[0] != [0.0, 0.0, 1.0, 1.0]))
