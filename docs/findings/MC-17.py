"""MC-17: padding to a capacity needs equal token counts.

Two ranks, of eight tokens and of four. Exits 1 while the finding is there.
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
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with the capacity, and again when the dispatch has returned."""
    torch.cuda.current_device, torch.cuda.Stream = lambda: torch.device("cpu"), lambda: None
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4, moe_router_topk=1,
        moe_router_pre_softmax=True, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2,
        moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    dispatcher = MoEAlltoAllTokenDispatcher(2, [2 * rank, 2 * rank + 1], config, groups)
    T = 8 - 4 * rank
    chosen = F.one_hot(torch.arange(T) % 4, 4).bool()
    probs, chosen = apply_router_token_dropping(chosen * 0.5, chosen, 1, 2.0, pad_to_capacity=True)
    hidden, probs = dispatcher.dispatch_preprocess(torch.randn(T, 4), chosen, probs)
    answers.put((rank, f"capacity {dispatcher.capacity}"))
    dispatcher.token_dispatch(hidden, probs)
    answers.put((rank, "returned"))


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    ranks = mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    found = sorted(answers.get() for _ in range(4) if not answers.empty())
    capacities = [text for _, text in found if text != "returned"]
    returned = "every rank" if len(found) == 4 else "not every rank"
    print(f"observed: {', '.join(capacities)} on ranks 0 and 1; the dispatch returns on {returned}")
    print("expected: one capacity, or exchanged ones, on ranks 0 and 1; the dispatch returns on every rank")
    sys.exit(int(len(found) < 4))
