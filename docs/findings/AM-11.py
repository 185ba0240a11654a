"""AM-11: training fails after a first forward in inference mode, where FSDP2 shards the experts.

Two ranks that replicate the experts. Exits 1 while the finding is there.
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
from torch.distributed.fsdp import fully_shard

OPTIONS = {
    "n_routed_experts": 4, "n_shared_experts": 0, "n_activated_experts": 1, "n_expert_groups": 1, "n_limited_groups": 1,
    "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "score_func": "softmax",
    "route_scale": 1.0, "dim": 8, "inter_dim": 8, "moe_inter_dim": 8, "norm_topk_prob": False, "dtype": torch.float32,
}  # fmt: skip


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with how a training step ends, after a forward under no_grad and after one in inference mode."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.compiler.set_stance("force_eager")
    mesh, x, ids = dist.init_device_mesh("cpu", (2,)), torch.ones(4, 8), torch.tensor([[0], [1], [2], [3]])
    mask = torch.ones(4, dtype=torch.bool)
    for without_gradients in (torch.no_grad, torch.inference_mode):
        experts = GroupedExperts(MoEConfig(**OPTIONS))
        fully_shard(experts, mesh=mesh, reshard_after_forward=False)
        with without_gradients():
            experts(x, mask, torch.ones(4, 1), ids)
        try:
            experts(x.clone().requires_grad_(), mask, torch.ones(4, 1), ids).sum().backward()
            answers.put((rank, without_gradients.__name__, "works"))
        except RuntimeError as error:
            answers.put((rank, without_gradients.__name__, f"raises: {str(error).split('.')[0]}"))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = {(rank, mode): text for rank, mode, text in (answers.get() for _ in range(4))}
    no_grad, inference = found[0, "no_grad"], found[0, "inference_mode"]
    print(f"observed: after no_grad training {no_grad}; after inference mode it {inference}")
    print("expected: after no_grad training works; after inference mode it works")
    sys.exit(int(set(found.values()) != {"works"}))
