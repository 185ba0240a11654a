"""FP-05: the direct route is taken where a rank has other than K experts, and its rows are others.

Six tokens on each of two ranks are forced to 2 of 8 experts. Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def run(rank: int, store: str, answers: Any, end: Any) -> None:
    """Answer with how the dispatch ends."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dispatcher = AllToAllTokenDispatcher.Config(
        num_experts=8, top_k=2, score_before_experts=False, force_load_balance=True
    ).build()
    dispatcher.ep_mesh = mesh
    ids = torch.arange(12).reshape(6, 2) % 8
    try:
        rows, counts, _ = dispatcher.dispatch(
            torch.randn(6, 8), torch.ones(6, 2), ids, torch.bincount(ids.flatten(), minlength=8)
        )
        len(rows.clone())  # torch hands over what was received when it is first used
        answers.put((rank, f"gets {counts.tolist()}"))
    except RuntimeError as error:
        answers.put((rank, f"raises: {str(error).splitlines()[0]}"))
    end.wait(10)  # a rank that ended at once would end the other's waiting


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found = dict(answers.get() for _ in range(2) if not answers.empty())
    print(f"observed: rank 0 {found.get(0)}; rank 1 {found.get(1)}")
    print("expected: rank 0 gets [4, 4, 4, 4]; rank 1 gets [2, 2, 2, 2]")
    sys.exit(int(found != {0: "gets [4, 4, 4, 4]", 1: "gets [2, 2, 2, 2]"}))
