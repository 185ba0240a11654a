"""MC-70: with ep = etp = 1, experts with biases raise: the output bias is added in place to a view of a function.

Four tokens and two experts on one rank. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device, torch.cuda.current_stream = lambda: torch.device("cpu"), lambda: None
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4,
    num_moe_experts=2, moe_router_topk=1, moe_router_pre_softmax=True, moe_token_dispatcher_type="allgather",
    add_bias_linear=True, perform_initialization=False,
)  # fmt: skip
parts = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
# In newer versions it is what builds the layer.
old = hasattr(parts, "submodules")
layer = MoELayer(config, parts.submodules, 1) if old else parts(config=config, layer_number=1)
for parameter in layer.parameters():
    torch.nn.init.normal_(parameter)
rows, counts, weights = torch.ones(4, 4, requires_grad=True), torch.tensor([2, 2]), torch.ones(4)
observed = "accepted"
try:
    layer.experts(rows, counts, weights)[0].sum().backward()
except RuntimeError as error:
    observed = str(error).partition(". ")[0]
print(f"observed: {observed}")
print("expected: accepted")
sys.exit(int(observed != "accepted"))
