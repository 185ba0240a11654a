"""TT-07: invalid input on one rank leaves the others waiting.

Two ranks: correct input first, then an id of E on rank 1. Exits 1 while the finding is there.
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
from torchtitan.distributed import utils
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def run(rank: int, store: str, answers: Any, end: Any) -> None:
    """Answer with how the second dispatch ends; gloo waits for five seconds."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    utils.set_spmd_backend("partial_dtensor")  # TT-05
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=4, top_k=2).build()
    dispatcher.wire_meshes(ep_mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    x, weights = torch.randn(6, 8), torch.full((6, 2), 0.5)
    ids = torch.stack([torch.arange(6) % 4, (torch.arange(6) + 1) % 4], 1)
    dispatcher.dispatch(x, weights, ids, torch.bincount(ids.flatten(), minlength=4))
    if rank == 1:
        ids[1, 0] = 4
    try:
        rows, _, _ = dispatcher.dispatch(x, weights, ids, torch.bincount(ids.flatten(), minlength=4)[:4])
        len(rows.clone())  # torch hands over what was received when it is first used
        answers.put((rank, "returns"))
    except RuntimeError as error:
        answers.put((rank, "waits" if "Timed out" in str(error) else f"raises: {str(error).splitlines()[0]}"))
    end.wait(10)  # a rank that ended at once would end the other's waiting


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found = dict(answers.get() for _ in range(2) if not answers.empty())
    print(f"observed: rank 1 {found.get(1)}; rank 0 {found.get(0)}")
    print("expected: both ranks raise")
    sys.exit(int(found.get(0) == "waits"))
