"""FP-03: forced load balance takes every rank to have as many tokens as this one.

Two ranks with 4 and 2 tokens, routed as the library's router forces them. Exits 1 while the finding is there.
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
    """Answer with the rows that this rank expects from each, and with how the dispatch ends."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dispatcher = AllToAllTokenDispatcher.Config(
        num_experts=4, top_k=2, score_before_experts=False, force_load_balance=True
    ).build()
    dispatcher.ep_mesh = mesh
    T = 4 - 2 * rank
    ids = torch.arange(2 * T).reshape(T, 2) % 4
    answers.put((rank, f"expects {dispatcher._force_load_balance_splits(T, 2, rank, torch.int64, ids.device)[2]}"))
    end.wait(10)
    try:
        rows, counts, _ = dispatcher.dispatch(
            torch.randn(T, 8), torch.ones(T, 2), ids, torch.bincount(ids.flatten(), minlength=4)
        )
        len(rows.clone())  # torch hands over what was received when it is first used
        if counts.tolist() == [3, 3]:
            answers.put((rank, "gets [3, 3]"))
    except RuntimeError:
        pass  # what the other rank sent does not fit
    end.wait(10)  # a rank that ended at once would end the other's waiting


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found: dict[int, list[str]] = {0: [], 1: []}
    while not answers.empty():
        rank, word = answers.get()
        found[rank].append(word)
    print("observed: 4 and 2 tokens:", "; ".join(f"rank {rank} {', '.join(words)}" for rank, words in found.items()))
    right = "expects [4, 2], gets [3, 3]"
    print(f"expected: 4 and 2 tokens: rank 0 {right}; rank 1 {right}")
    sys.exit(int(any("gets [3, 3]" not in words for words in found.values())))
