"""MC-01: with ep = 1, expert gradients are reduced over the dense data parallel group, also where etp differs from tp.

Two ranks, tp = 2 and etp = 1: both hold all experts, and each has tokens of its own. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def run(rank: int, store: str, reduced: torch.Tensor) -> None:
    """Write the reduced gradient of expert 0 into the rank's row."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=2, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4,
        num_moe_experts=2, moe_router_topk=2, moe_token_dispatcher_type="allgather", add_bias_linear=False,
        tensor_model_parallel_size=2, expert_tensor_parallel_size=1, sequence_parallel=True,
        perform_initialization=False,
    )  # fmt: skip
    parts = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
    layer = MoELayer(config, parts.submodules, layer_number=1)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    ddp(torch.full((3, 1, 4), 1.0 + rank))[0].sum().backward()
    finalize_model_grads([ddp])
    reduced[rank] = layer.experts.local_experts[0].linear_fc2.weight.main_grad


if __name__ == "__main__":
    reduced = torch.full((2, 4, 4), torch.nan).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), reduced), nprocs=2, start_method="fork")
    same = torch.allclose(reduced[0], reduced[1])
    print("observed: the reduced gradients of expert 0 on its two replicas", "are the same" if same else "differ")
    print("expected: the reduced gradients of expert 0 on its two replicas are the same")
    sys.exit(int(not same))
