"""MC-65: the scores of the auxiliary loss are computed in the dtype of the logits.

Exits 1 while the finding is there.
Needs: megatron-core<0.17
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


def reported(dtype: torch.dtype) -> float:
    """Return the auxiliary loss of the same logits, stored in bfloat16, as the router passes them on."""
    moe_utils.clear_aux_losses_tracker()
    layer = router(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0, moe_router_score_function="sigmoid"
    )
    logits = (4 * torch.randn(S, B, E)).bfloat16()
    layer.routing(logits.to(dtype).requires_grad_())
    return float(moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"][0])


narrow, wide = reported(torch.bfloat16), reported(torch.float32)
print(f"observed: the auxiliary loss of bfloat16 logits is {narrow:.6f}")
print(f"expected: the auxiliary loss of bfloat16 logits is {wide:.6f}, as of the same logits in float32")
sys.exit(int(abs(narrow - wide) > 1e-5))
