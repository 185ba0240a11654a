"""MC-76: router replay accepts records of fewer tokens and of fewer slots.

Four tokens that are to replay a record of three, and one of a single slot. Exits 1 while the finding is there.
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
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

torch.compiler.set_stance("force_eager")
torch.cuda.current_device = lambda: torch.device("cpu")
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4, moe_router_topk=2,
    moe_router_pre_softmax=True, moe_enable_routing_replay=True,
    moe_token_dispatcher_type="alltoall", add_bias_linear=False, perform_initialization=False,
)  # fmt: skip
router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
router.weight = torch.nn.Parameter(torch.eye(4))
found = []
for shape in ((3, 2), (4, 1)):
    RouterReplay.set_replay_data([torch.arange(shape[1]).repeat(shape[0], 1)])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        found.append(str(router(torch.randn(4, 1, 4))[1].sum(1).tolist()))
    except (IndexError, RuntimeError, ValueError):
        found.append("an error")
print(f"observed: experts of each token with a record of three tokens: {found[0]}, of one slot: {found[1]}")
print("expected: experts of each token with a record of three tokens: an error, of one slot: an error")
sys.exit(int(found != ["an error"] * 2))
