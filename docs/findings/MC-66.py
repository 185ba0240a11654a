"""MC-66: rows of padding to a capacity are counted as load of the expert bias.

Eight tokens, all of which select experts 0 and 1 of eight; each expert has a capacity of four rows. Exits 1 while the
finding is there.
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
    num_layers=1, num_attention_heads=1, hidden_size=8, num_moe_experts=8, moe_router_topk=2,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
    moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True, moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall", add_bias_linear=False, perform_initialization=False,
)  # fmt: skip
router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
router.weight = torch.nn.Parameter(torch.eye(8))
router(torch.tensor([2.0, 1.0, 0, 0, 0, 0, 0, 0]).repeat(8, 1, 1))
load = router.local_tokens_per_expert.int().tolist()
bias = moe_utils.get_updated_expert_bias(router.local_tokens_per_expert, router.expert_bias, 0.5).tolist()
print(f"observed: load {load}, updated bias {bias}")
print(f"expected: load {[4, 4, 0, 0, 0, 0, 0, 0]}, updated bias {[-0.5] * 2 + [0.5] * 6}")
sys.exit(int(load != [4, 4, 0, 0, 0, 0, 0, 0]))
