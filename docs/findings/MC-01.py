"""MC-01: with ep = 1, expert gradients are reduced over the dense data parallel group, also where etp differs from tp.

Two ranks, each with tokens of its own. With tp 2 and etp 1 both hold all experts, and their gradients have to be added
up; with tp 1 and etp 2 each holds its half of every expert, and these have not. Exits 1 while the finding is there.
Needs: megatron-core<0.19
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


def run(rank: int, store: str, tp: int, etp: int, reduced: torch.Tensor) -> None:
    """Write the reduced gradient of expert 0 into the rank's row."""
    torch.cuda.current_device, torch.cuda.current_stream = lambda: torch.device("cpu"), lambda: None
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_tensor_parallel_size=etp)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=2, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4,
        num_moe_experts=2, moe_router_topk=2, moe_token_dispatcher_type="allgather", add_bias_linear=False,
        tensor_model_parallel_size=tp, expert_tensor_parallel_size=etp, sequence_parallel=tp > 1,
        perform_initialization=False,
    )  # fmt: skip
    parts = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
    # In newer versions it is what builds the layer.
    old = hasattr(parts, "submodules")
    layer = MoELayer(config, parts.submodules, 1) if old else parts(config=config, layer_number=1)
    torch.manual_seed(0 if etp == 1 else rank)  # the halves of an expert differ
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    ddp(torch.full((3, 1, 4), 1.0 + rank))[0].sum().backward()
    finalize_model_grads([ddp])
    reduced[rank].copy_(layer.experts.local_experts[0].linear_fc2.weight.main_grad)
    dist.barrier()


def same(tp: int, etp: int) -> bool:
    """Return whether expert 0 has one gradient on both ranks."""
    reduced = torch.full((2, 4, 4 // etp), torch.nan).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), tp, etp, reduced), nprocs=2, start_method="fork")
    return torch.allclose(reduced[0], reduced[1])


if __name__ == "__main__":
    replicas, halves = same(2, 1), same(1, 2)
    says = {True: "have the same gradient", False: "have different gradients"}
    print(f"observed: replicas of an expert {says[replicas]}; two halves of an expert {says[halves]}")
    print(f"expected: replicas of an expert {says[True]}; two halves of an expert {says[False]}")
    sys.exit(int(not replicas or halves))
