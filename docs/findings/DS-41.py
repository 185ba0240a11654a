"""DS-41: the engine clips by the mean of the ranks' norms, not by the norm. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys
from tempfile import TemporaryDirectory

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import multiprocessing, nn

LARGEST = 1.0


def clipped_norm(rank: int, store: str, answer: str) -> None:
    """Clip one step of two ranks, each with an expert of its own; write the norm of the gradient that was used."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # DS-07
    deepspeed.init_distributed("gloo")
    groups._create_expert_and_data_parallel(2)
    torch.manual_seed(rank)
    layer = MoE(8, nn.Linear(8, 8, bias=False), num_experts=2, ep_size=2, k=2, drop_tokens=False, use_rts=False)
    engine, *_ = deepspeed.initialize(
        model=layer,
        model_parameters=list(layer.parameters()),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": LARGEST,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        },
    )
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    y, *_ = engine(torch.randn(1, 16, 8))
    engine.backward(100 * y.square().sum())
    engine.step()
    squares = torch.zeros(())
    for old, parameter in zip(before, layer.parameters(), strict=True):
        of_expert = not getattr(parameter, "allreduce", True)
        squares += (old - parameter.detach()).square().sum() * (1.0 if of_expert or rank == 0 else 0.0)
    dist.all_reduce(squares)
    if rank == 0:
        torch.save(squares.sqrt(), answer)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        answer = f"{folder}/answer"
        multiprocessing.start_processes(clipped_norm, (f"{folder}/store", answer), nprocs=2, start_method="fork")
        norm = float(torch.load(answer))
    print(f"observed: the norm of the gradient of a step, clipped to {LARGEST}: {norm:.3f}")
    print(f"expected: the norm of the gradient of a step, clipped to {LARGEST}: {LARGEST:.3f}")
    sys.exit(int(abs(norm - LARGEST) > 1e-3))
