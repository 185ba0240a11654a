"""DS-10: the engine reduces no gradients of float64. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # DS-07
    comm.init_distributed("gloo")
    model = torch.nn.Linear(4, 4).double()
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    try:
        engine.allreduce_gradients()
        found = "returns"
    except AssertionError as error:
        found = f"raises: {error}"
    print("observed: allreduce_gradients after a backward in float64", found)
    print("expected: allreduce_gradients after a backward in float64 returns")
    sys.exit(int(found != "returns"))
