"""MC-31: a number of experts that ep does not divide is refused without a message.

Two ranks, three experts. Exits 1 while the finding is there.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with the exception of the layer's constructor."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    try:
        config = TransformerConfig(
            num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=3, moe_router_topk=2,
            moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2, add_bias_linear=False,
        )  # fmt: skip
        parts = get_moe_module_spec(use_te=False, num_experts=3, moe_grouped_gemm=False)
        # In newer versions it is what builds the layer.
        old = hasattr(parts, "submodules")
        MoELayer(config, parts.submodules, 1) if old else parts(config=config, layer_number=1)
        answers.put("no error")
    except (AssertionError, ValueError) as error:
        answers.put(f"{type(error).__name__}: {str(error) or 'no message'}")
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    observed = answers.get()
    print(f"observed: {observed}")
    print("expected: an error with a message that names 3 and 2")
    sys.exit(int("3" not in observed or "2" not in observed))
