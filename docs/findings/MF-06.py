"""MF-06: NCCL EP takes the bound of its tokens from the first batch of each rank.

Two ranks, of 40 and of 70 tokens in the first batch; then of 40 in the first and 70 in the second. The kernel is a
stand-in, which says what the kernel's documentation demands. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_conformance.stand_ins.nccl_ep import WideNcclEp
from moe_conformance.stand_ins.presenting import loaded_with, module


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with what becomes of each batch."""
    pytorch = module("transformer_engine.pytorch", ep=WideNcclEp())
    fused = loaded_with(
        fused_a2a,
        {"transformer_engine": module("transformer_engine", pytorch=pytorch), "transformer_engine.pytorch": pytorch},
    )
    for name in [name for name in vars(fused) if "nccl_ep" in name and hasattr(token_dispatcher, name)]:
        setattr(token_dispatcher, name, getattr(fused, name))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    needs_factor = hasattr(TransformerConfig, "moe_ncclep_static_shape")
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=2, moe_router_topk=1,
        moe_router_pre_softmax=True, expert_model_parallel_size=2, moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="ncclep", moe_expert_rank_capacity_factor=2.0 if needs_factor else None,
    )  # fmt: skip
    for tokens in ((40, 70), (40, 40), (70, 70)):
        if tokens == (40, 40):
            fused.nccl_ep_finalize()  # of the first case
        if tokens != (70, 70):
            manager = token_dispatcher._NCCLEPManager(dist.group.WORLD, 1, 1, 2, config)
        chosen = torch.nn.functional.one_hot(torch.arange(tokens[rank]) % 2, 2)
        manager.setup_metadata(chosen.bool(), chosen * 0.5)
        try:
            manager.dispatch(torch.ones(tokens[rank], 4))
            answers.put((rank, "dispatches"))
        except RuntimeError as error:
            answers.put((rank, f"raises: {error}"))


if __name__ == "__main__":
    if not hasattr(token_dispatcher, "_NCCLEPManager"):
        print("not there: this Megatron-Core has no NCCL EP")
        sys.exit(77)
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    given = [answers.get() for _ in range(6)]
    found = [text for rank, text in given if rank == 0]
    print(f"observed: with 40 and 70 tokens rank 0 {found[0]}")
    print(f"observed: with 70 tokens after 40 rank 0 {found[2]}")
    print("expected: both are dispatched")
    sys.exit(int(found != ["dispatches"] * 3))
