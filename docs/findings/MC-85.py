"""MC-85: with use_cpu_initialization the experts of all ep ranks start with the same values.

Two ranks, ep 2, two experts, generators seeded as Megatron-LM's trainer does. Exits 1 while the finding is there.
"""

from __future__ import annotations

import random
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def run(rank: int, store: str, weights: torch.Tensor) -> None:
    """Write the first projection of the rank's expert into its row."""
    torch.cuda.current_device, torch.cuda.current_stream = lambda: torch.device("cpu"), lambda: None
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=2, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4,
        num_moe_experts=2, moe_router_topk=2, moe_token_dispatcher_type="allgather", add_bias_linear=False,
        expert_model_parallel_size=2, use_cpu_initialization=True,
    )  # fmt: skip
    parts = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
    # As _set_random_seed of Megatron-LM does; the tracker of CUDA's states is not asked with this option.
    random.seed(1234)
    torch.manual_seed(1234)
    # In newer versions the spec is what builds the layer.
    old = hasattr(parts, "submodules")
    layer = MoELayer(config, parts.submodules, 1) if old else parts(config=config, layer_number=1)
    weights[rank].copy_(layer.experts.local_experts[0].linear_fc1.weight.detach())
    dist.barrier()


if __name__ == "__main__":
    weights = torch.full((2, 4, 4), torch.nan).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), weights), nprocs=2, start_method="fork")
    equal = int((weights[0] == weights[1]).sum())
    of = weights[0].numel()
    print(f"observed: expert 0 of ep rank 0 and expert 1 of ep rank 1 have {equal} of {of} weights in common")
    print("expected: 0, or a few by chance")
    sys.exit(int(equal == of))
