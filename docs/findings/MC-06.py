"""MC-06: the all-gather dispatcher needs equal token counts.

Two ranks, of four tokens and of three. Exits 1 while the finding is there.
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
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


def run(rank: int, store: str, done: Any) -> None:
    """Dispatch, and say that it has returned."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4, moe_router_topk=2,
        moe_token_dispatcher_type="allgather", expert_model_parallel_size=2,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    dispatcher = MoEAllGatherTokenDispatcher(2, [2 * rank, 2 * rank + 1], config, groups)
    T = 4 - rank
    chosen = F.one_hot(torch.arange(T) % 4, 4).bool()
    hidden, probs = dispatcher.dispatch_preprocess(torch.randn(T, 4), chosen, chosen.float())
    rows, counts, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(hidden, probs))
    if counts.sum() == len(rows) == (4 if rank == 0 else 3):  # tokens of experts 0 and 1, and of 2 and 3
        done.put(rank)


if __name__ == "__main__":
    done = multiprocessing.get_context("fork").SimpleQueue()
    ranks = mp.start_processes(run, (tempfile.mktemp(), done), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    right = sum(not done.empty() and done.get() >= 0 for _ in range(2))
    print("observed: the dispatch returns the rows of all tokens on", "every rank" if right == 2 else "not every rank")
    print("expected: the dispatch returns the rows of all tokens on every rank")
    sys.exit(int(right < 2))
