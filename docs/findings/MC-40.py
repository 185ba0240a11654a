"""MC-40: a padding mask with an expert bias leaves experts instead of tokens out of the load, or raises.

Eight tokens, of which the last four are padding, and eight experts. Exits 1 while the finding is there.
Needs: megatron-core<0.20,!=0.19.0
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

torch.compiler.set_stance("force_eager")
torch.cuda.current_device = lambda: torch.device("cpu")
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=8, moe_router_topk=2,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
    moe_token_dispatcher_type="alltoall", add_bias_linear=False, perform_initialization=False,
)  # fmt: skip
router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
router.weight = torch.nn.Parameter(torch.eye(8, 4) + torch.eye(8, 4).roll(4, 0) * 0.5)  # token d: experts d and d + 4
x, mask = 9.0 * torch.eye(4).repeat(2, 1)[:, None], torch.arange(8)[:, None] >= 4
router(x, mask)
load = router.local_tokens_per_expert.int().tolist()
try:
    router(x.repeat(2, 1, 1), mask.repeat(2, 1))
    larger = "accepted"
except RuntimeError as error:
    larger = str(error)
print(f"observed: load {load}; 16 tokens: {larger}")
print(f"expected: load {[1] * 8}; 16 tokens: accepted")
sys.exit(int(load != [1] * 8 or larger != "accepted"))
