"""AM-10: tokens are padded to the largest number on a rank, and the outputs of all come back to all.

Two ranks with 4 tokens and none, two experts on each. Exits 1 while the finding is there.
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
    """Answer with the rows of hidden states that a forward hands to collectives on this rank."""
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    experts = GroupedExperts(MoEConfig(**OPTIONS))
    with torch.no_grad():
        experts.init_weights(torch.device("cpu"))
    parallelize_module(experts, mesh, ExpertParallel())
    T, rows = 4 - 4 * rank, []
    gather, reduce = dist.all_gather, dist.all_reduce

    def all_gather(parts: Any, tensor: torch.Tensor, group: Any = None) -> Any:
        rows.append(len(tensor) if tensor.shape[1:] == (8,) else 0)
        return gather(parts, tensor, group=group)

    def all_reduce(tensor: torch.Tensor, *how: Any, **named: Any) -> Any:
        rows.append(len(tensor))
        return reduce(tensor, *how, **named)

    dist.all_gather, dist.all_reduce = all_gather, all_reduce
    experts(torch.randn(T, 8), torch.ones(T, dtype=torch.bool), torch.ones(T, 1), torch.zeros(T, 1, dtype=torch.int64))
    dist.all_gather, dist.all_reduce = gather, reduce
    answers.put((rank, (rows[1], rows[-1])))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = dict(answers.get() for _ in range(2))
    (sent, reduced), (sent_without, _) = found[0], found[1]
    words = f"{sent} and {sent_without} rows; all-reduced are {reduced} rows"
    print("observed: of 4 and no tokens ranks send", words)
    print("expected: of 4 and no tokens ranks send 4 and 0 rows; reduced and scattered are 4 rows")
    sys.exit(int(sent_without > 0))
