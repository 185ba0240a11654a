"""TF-08: AutoEP applies weights in the experts in inference, and in combine in training.

Two ranks with the same tokens, all of which are routed to one expert of rank 0, with a weight of 0.5. Exits 1 while it
is so; outputs are correct in both.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed.expert_parallel import AutoEP


class Experts(torch.nn.Module):
    """Two experts, the identity, that keep the largest weight that they are given."""

    num_experts = 2

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted rows; an id of 2 is of another rank's expert."""
        self.weight = weights.max().item()
        return rows * (weights * (ids < 2)).sum(1, keepdim=True)


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with the weight that the experts of rank 0 get, and whether the output is right."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, experts = dist.init_device_mesh("cpu", (2,)), Experts()
    exchange = AutoEP(experts, mesh, mesh)
    x, ids, weights = torch.ones(4, 32), torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 1), 0.5)
    right = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            y = exchange(x.clone().requires_grad_(gradients), ids, weights)
        right.append(torch.equal(y.detach(), 0.5 * x))
        if rank == 0:
            answers.put(experts.weight)
    answers.put(all(right))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = [answers.get() for _ in range(4)]
    inference, training = [each for each in found if not isinstance(each, bool)]
    right = all(each for each in found if isinstance(each, bool))
    print(f"observed: experts get the weight {inference} in inference, {training} in training; outputs right: {right}")
    print("expected: experts get the same weight in inference and in training; outputs right: True")
    sys.exit(int(inference != training or not right))
