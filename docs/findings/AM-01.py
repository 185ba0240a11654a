"""AM-01: a token with NaN or infinity makes the output of every token of the expert parallel group NaN.

Two ranks with two tokens each, two experts on each. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExperts
from nemo_automodel.components.moe.parallelizer import ExpertParallel
from torch.distributed.tensor.parallel import parallelize_module

OPTIONS = {
    "n_routed_experts": 4, "n_shared_experts": 0, "n_activated_experts": 1, "n_expert_groups": 1, "n_limited_groups": 1,
    "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "score_func": "softmax",
    "route_scale": 1.0, "dim": 8, "inter_dim": 8, "moe_inter_dim": 8, "norm_topk_prob": False, "dtype": torch.float32,
}  # fmt: skip


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with which tokens of this rank have a finite output, where one of rank 0 begins with infinity."""
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    experts = GroupedExperts(MoEConfig(**OPTIONS))
    with torch.no_grad():
        experts.init_weights(torch.device("cpu"))
    parallelize_module(experts, mesh, ExpertParallel())
    x = torch.randn(2, 8)
    if rank == 0:
        x[0, 0] = float("inf")
    ids = torch.tensor([[2 * rank], [2 * rank + 1]])
    y = experts(x, torch.ones(2, dtype=torch.bool), torch.ones(2, 1), ids)
    answers.put((rank, y.isfinite().all(1).tolist()))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = dict(answers.get() for _ in range(2))
    print(f"observed: tokens with a finite output: {found[0]} on rank 0, {found[1]} on rank 1")
    print("expected: tokens with a finite output: [False, True] on rank 0, [True, True] on rank 1")
    sys.exit(int(found != {0: [False, True], 1: [True, True]}))
