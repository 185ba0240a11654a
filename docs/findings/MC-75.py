"""MC-75: input jitter is applied in evaluation mode too.

Four equal tokens in evaluation mode, with an identity for a router. Exits 1 while the finding is there.
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
    moe_router_pre_softmax=True, moe_input_jitter_eps=0.25,
    moe_token_dispatcher_type="alltoall", add_bias_linear=False, perform_initialization=False,
)  # fmt: skip
router = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
router.weight = torch.nn.Parameter(torch.eye(4))
router.eval()
logits = router.gating(router.apply_input_jitter(torch.ones(4, 1, 4)))
jittered = not torch.equal(logits, torch.ones(4, 1, 4))
print(f"observed: in evaluation mode the logits are those of {'x times jitter' if jittered else 'x'}")
print("expected: in evaluation mode the logits are those of x")
sys.exit(int(jittered))
