"""TF-14: tensor parallel ranks with different batches are accepted.

Two ranks, two experts on each. Rank 0 routes both tokens to expert 0, rank 1 both to expert 2. Exits 1 while the
finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP


class Experts(torch.nn.Module):
    """Two experts of a rank: they return ten times the global id, plus one."""

    num_experts = 2

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted rows; an id of 2 is of another rank's expert."""
        ids_here = ids + 2 * dist.get_rank()
        return rows * ((10.0 * ids_here + 1) * weights * (ids < 2)).sum(1, keepdim=True)


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with the outputs of both tokens."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    x, ids, weights = torch.ones(2, 1), torch.tensor([[2 * rank], [2 * rank]]), torch.ones(2, 1)
    for exchange in (AllToAllEP, AllReduceEP):
        try:
            answers.put((exchange.__name__, rank, exchange(Experts(), mesh, mesh)(x, ids, weights).flatten().tolist()))
        except (RuntimeError, ValueError):
            answers.put((exchange.__name__, rank, "refused"))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = {(name, rank): y for name, rank, y in (answers.get() for _ in range(4))}
    for name in ("AllToAllEP", "AllReduceEP"):
        print(f"observed: {name} returns {found[name, 0]} on rank 0, {found[name, 1]} on rank 1")
    print("expected: refused, or [1.0, 1.0] on rank 0, [21.0, 21.0] on rank 1")
    wrong = [y for (_, rank), y in found.items() if y not in ("refused", [[1.0, 1.0], [21.0, 21.0]][rank])]
    sys.exit(int(bool(wrong)))
