"""MC-61: the sequence loss divides the counts of ragged sequences by their mean length.

Exits 1 while the finding is there.
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


layer = router(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1.0)
x = torch.randn(S, B, D)
padding = torch.zeros(S, B, dtype=torch.bool)  # True = padding
padding[2:, 1] = True  # the second sequence has 2 tokens, the first has 6


def reported(x: torch.Tensor, padding: torch.Tensor) -> float:
    """Return the loss that the router reports."""
    moe_utils.clear_aux_losses_tracker()
    layer(x, padding)
    return float(moe_utils.get_moe_layer_wise_logging_tracker()["seq_load_balancing_loss"]["values"][0])


together = reported(x, padding)
alone = [reported(x[:, :1], padding[:, :1]), reported(x[:2, 1:], padding[:2, 1:])]
mean = sum(alone) / 2
print(f"observed: the sequence loss of sequences of 6 and 2 tokens is {together:.4f}")
of = f"the mean of {alone[0]:.4f} and {alone[1]:.4f}"
print(f"expected: the sequence loss of sequences of 6 and 2 tokens is {mean:.4f}, {of}")
sys.exit(int(abs(together - mean) > 1e-4))
