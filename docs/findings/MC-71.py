"""MC-71: with sequence parallelism, gradients of output biases of different experts are added up over tp.

Two ranks, tp = ep = 2: each holds one of two experts, and both have tokens of their own. Exits 1 while the finding is
there.
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


def run(rank: int, store: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Write the gradient of the output bias of the rank's expert, before and after gradients are finished."""
    torch.cuda.current_device, torch.cuda.current_stream = lambda: torch.device("cpu"), lambda: None
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    config = TransformerConfig(
        num_layers=1, num_attention_heads=2, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4,
        num_moe_experts=2, moe_router_topk=2, moe_token_dispatcher_type="allgather", add_bias_linear=True,
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
        sequence_parallel=True, perform_initialization=False,
    )  # fmt: skip
    parts = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
    # In newer versions it is what builds the layer.
    old = hasattr(parts, "submodules")
    layer = MoELayer(config, parts.submodules, 1) if old else parts(config=config, layer_number=1)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    experts, weights = layer.experts, torch.full((3,), 1.0 + rank)  # of the tokens of both ranks for one expert
    experts(torch.ones(3, 4), torch.tensor([3]), weights)[0].sum().backward()
    bias = experts.local_experts[0].linear_fc2.bias
    before[rank] = bias.main_grad[0]
    finalize_model_grads([ddp])
    after[rank] = bias.main_grad[0]
    dist.barrier()


if __name__ == "__main__":
    before, after = torch.zeros(2).share_memory_(), torch.zeros(2).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), before, after), nprocs=2, start_method="fork")
    words = "the gradients of the output biases of experts 0 and 1 are"
    print(f"observed: {words} {after.tolist()}")
    print(f"expected: {words} {before.tolist()}")
    sys.exit(int(not torch.allclose(before, after)))
