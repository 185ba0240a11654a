"""MC-161: with calculate_per_token_loss a rank takes the tokens of its tp x cp group for equally many as its own.

A rank multiplies the loss by its own valid tokens and the size of the group. Of two ranks one has padding alone here.
Exits 1 while the finding is there.
Needs: megatron-core>=0.19
"""

from __future__ import annotations

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.simplefilter("ignore")
E, D, T = 4, 8, 8


def gradient(rank: int, world: int, store: str, found: torch.Tensor) -> None:
    """Finish the gradient of a router whose ranks hold the parts of one microbatch, and keep it."""
    torch.cuda.current_device, torch.cuda.current_stream = lambda: "cpu", lambda: None
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe_utils.te_general_gemm = None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=2,
        hidden_size=D,
        num_moe_experts=E,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        tensor_model_parallel_size=world,
        sequence_parallel=world > 1,
        calculate_per_token_loss=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
        add_bias_linear=False,
        perform_initialization=False,
    )
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection

    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    torch.manual_seed(0)
    router.weight.data.copy_(torch.randn(E, D))
    x = torch.randn(T, 1, D).chunk(world)[rank]
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), router)
    padding = (torch.arange(T) >= T // 2).reshape(T, 1).chunk(world)[rank]
    weights, _ = chunk(x, padding)
    weights.backward(torch.zeros_like(weights))  # no main loss
    finalize_model_grads([chunk], torch.tensor(T // 2))
    if rank == 0:
        found.copy_(router.weight.main_grad)
    dist.destroy_process_group()


def finished(world: int) -> torch.Tensor:
    """Return what ranks finish."""
    found = torch.zeros(E, D).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(gradient, (world, f"{folder}/store", found), nprocs=world, start_method="fork")
    return found


if __name__ == "__main__":
    one, two = finished(1), finished(2)
    ratio = float((one * two).sum() / (one * one).sum())
    print(f"observed: the same tokens on 2 tensor parallel ranks: {ratio:.3f} x the gradient of one rank")
    print("expected: the same tokens on 2 tensor parallel ranks: 1.000 x the gradient of one rank")
    sys.exit(int(abs(ratio - 1) > 1e-3))
