"""MF-05: the manager of DeepEP 2 gives its kernel the number of tokens of its own rank as the maximum of all ranks.

Two ranks, of eight tokens and of four. The kernel is a stand-in, which says what the kernel's documentation demands.
Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.transformer.moe import fused_a2a, token_dispatcher

from moe_conformance.stand_ins.elastic import WideElasticBuffer
from moe_conformance.stand_ins.presenting import loaded_with, module


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with what the kernel is given, or says."""
    fused = loaded_with(fused_a2a, {"deep_ep": module("deep_ep", ElasticBuffer=WideElasticBuffer)})
    token_dispatcher.deepepv2_dispatch = fused.deepepv2_dispatch
    token_dispatcher.get_elastic_buffer = fused.get_elastic_buffer
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = SimpleNamespace(
        moe_router_dtype=None, moe_expert_capacity_factor=None, moe_permute_fusion=False,
        moe_flex_dispatcher_num_sms=None,
    )  # fmt: skip
    manager = token_dispatcher._DeepepV2Manager(dist.group.WORLD, 1, 1, 2, config)
    T = 8 - 4 * rank
    chosen = torch.nn.functional.one_hot(torch.arange(T) % 2, 2)
    manager.setup_metadata(chosen.bool(), chosen * 0.5)
    try:
        manager.dispatch(torch.ones(T, 4))
        answers.put((rank, "dispatches"))
    except RuntimeError as error:
        answers.put((rank, f"raises: {error}"))


if __name__ == "__main__":
    if not hasattr(token_dispatcher, "_DeepepV2Manager"):
        print("not there: this Megatron-Core has no manager of DeepEP 2")
        sys.exit(77)
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = sorted(answers.get() for _ in range(2))
    for rank, text in found:
        print(f"observed: rank {rank} {text}")
    print("expected: both ranks dispatch")
    sys.exit(int(any(text != "dispatches" for _, text in found)))
