"""MC-41: invalid input on one rank leaves the others waiting, or ends a process.

Two ranks and an all-to-all: correct input first, then rank 1 has nine tokens and a map of eight rows, or tokens of half
the hidden size. Exits 1 while the finding is there.
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
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


def run(rank: int, store: str, T: int, D: int, answers: Any, end: Any) -> None:
    """Answer with how a dispatch of (T, D) on rank 1 ends; gloo waits for five seconds."""
    torch.cuda.current_device, torch.cuda.Stream = lambda: torch.device("cpu"), lambda: None
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, distributed_timeout_minutes=0.1)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4, moe_router_topk=1,
        moe_router_pre_softmax=True, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    dispatcher = MoEAlltoAllTokenDispatcher(2, [2 * rank, 2 * rank + 1], config, groups)
    dispatcher._maybe_dtoh_and_synchronize = lambda point, counts=None: copied(dispatcher, counts)
    chosen = F.one_hot(torch.arange(8) % 4, 4).bool()
    dispatch(dispatcher, torch.randn(8, 4), chosen)
    try:
        dispatch(dispatcher, torch.randn(T, D) if rank == 1 else torch.randn(8, 4), chosen)
        answers.put((rank, "returns"))
    except RuntimeError as error:
        answers.put((rank, "waits" if "Timed out" in str(error) else f"raises: {error}"))
    if D == 4:
        end.wait(10)  # a rank that ended at once would end the other's waiting


def dispatch(dispatcher: Any, x: torch.Tensor, chosen: torch.Tensor) -> None:
    """Send tokens to the ranks of their experts."""
    dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, chosen, chosen.float()))


def copied(dispatcher: Any, counts: torch.Tensor) -> torch.Tensor:
    """Do without streams what the library does at its synchronisation points: splits as lists."""
    for name in ("input_splits", "output_splits"):
        setattr(dispatcher, name, [int(each) for each in getattr(dispatcher, name)])
    return counts


def endings(T: int, D: int) -> list[str]:
    """Return how both ranks end."""
    context = multiprocessing.get_context("fork")
    answers, end = context.SimpleQueue(), context.Barrier(2)
    ranks = mp.start_processes(run, (tempfile.mktemp(), T, D, answers, end), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found = dict(answers.get() for _ in range(2) if not answers.empty())
    return [found.get(rank, "ends") for rank in range(2)]


if __name__ == "__main__":
    tokens, hidden = endings(9, 4), endings(8, 2)
    waits, ends = tokens[0] == "waits", "ends" in hidden
    print(f"observed: nine tokens: rank 1 {tokens[1]}; rank 0 {tokens[0]}")
    print("observed: half the hidden size:", "a process ends" if ends else "no process ends")
    print("expected: both ranks raise, and no process ends")
    sys.exit(int(waits or ends))
