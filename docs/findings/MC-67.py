"""MC-67: a forward in evaluation mode is counted as load of the expert bias where gradients are recorded.

Four tokens, in evaluation mode, with and without gradients. Exits 1 while the finding is there.
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
    num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4, moe_router_topk=1,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
    moe_token_dispatcher_type="alltoall", add_bias_linear=False, perform_initialization=False,
)  # fmt: skip
router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
router.weight = torch.nn.Parameter(torch.eye(4))
router.eval()
x = torch.eye(4)[:1].repeat(4, 1, 1)
with torch.no_grad():
    router(x)
without = router.local_tokens_per_expert.int().tolist()
router(x)
recorded = router.local_tokens_per_expert.int().tolist()
print(f"observed: after evaluation without gradients {without}, with gradients {recorded}")
print(f"expected: after evaluation without gradients {[0] * 4}, with gradients {[0] * 4}")
sys.exit(int(any(without) or any(recorded)))
