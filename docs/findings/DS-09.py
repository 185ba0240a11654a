"""DS-09: with tensor parallelism a capacity that tp does not divide raises. Exits 1 while the finding is there."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed import comm
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups


class Unit:
    """The model parallel unit of two tensor parallel ranks."""

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return tp."""
        return 2

    def get_tensor_model_parallel_rank(self) -> int:
        """Return this rank."""
        return dist.get_rank()

    def get_tensor_model_parallel_group(self) -> Any:
        """Return both ranks."""
        return dist.group.WORLD


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with how a forward of the same 6 tokens ends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # DS-07
    comm.init_distributed("gloo")
    groups.mpu = Unit()
    groups._create_expert_and_data_parallel(2)
    torch.manual_seed(0)
    layer = MoE(8, torch.nn.Linear(8, 8), 2, ep_size=2, k=1, min_capacity=0)  # C = 3
    layer.set_deepspeed_parallelism()
    try:
        layer(torch.randn(6, 8))
        answers.put("returns")
    except AssertionError as error:
        answers.put(f"raises: {error}")


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = answers.get()
    print("observed: a layer of capacity 3 on 2 tensor parallel ranks", found)
    print("expected: a layer of capacity 3 on 2 tensor parallel ranks returns")
    sys.exit(int(found != "returns"))
