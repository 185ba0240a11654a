"""MC-63: with calculate_per_token_loss the sequence loss enters with positions instead of tokens.

Exits 1 while the finding is there.
Needs: megatron-core<0.19
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"
from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

moe_utils.te_general_gemm = None
folder = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder.name, 'store')}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
E, D, S, B = 4, 8, 6, 2


def router(**options: object) -> TopKRouter:
    """Return a router of random weights."""
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=D,
        num_moe_experts=E,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        add_bias_linear=False,
        perform_initialization=False,
        **options,
    )
    made = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    made.set_layer_number(1)
    torch.manual_seed(0)
    made.weight.data.copy_(torch.randn(E, D))
    return made


def gradient(columns: int) -> torch.Tensor:
    """Return the gradient of two sequences, as many together in a microbatch, divided by their tokens."""
    layer = router(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1.0, calculate_per_token_loss=True)
    x = torch.randn(S, B, D)
    for some in x.split(columns, 1):
        weights, _ = layer(some)
        weights.backward(torch.zeros_like(weights))
    return layer.weight.grad / (S * B)


one, two = gradient(1), gradient(2)
ratio = float((one * two).sum() / (one * one).sum())
print(f"observed: two sequences in one microbatch have {ratio:.3f} x the gradient of two microbatches")
print("expected: two sequences in one microbatch have 1.000 x the gradient of two microbatches")
sys.exit(int(abs(ratio - 1) > 1e-3))
