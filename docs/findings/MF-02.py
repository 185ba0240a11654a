"""MF-02: HybridEP's receive budget has no room for the padding of experts.

One rank, 512 tokens that four experts get in equal parts of 128, K = 1, and a budget of the balanced load. Experts are
padded to a multiple of 256. The kernel is a stand-in. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher

from moe_conformance.stand_ins.hybrid_ep import WideHybridEPBuffer
from moe_conformance.stand_ins.presenting import loaded_with, module

zeros = torch.zeros
torch.zeros = lambda *sizes, device=None, **how: zeros(*sizes, **how)  # the manager allocates on "cuda"
fused = loaded_with(fused_a2a, {"deep_ep": module("deep_ep", HybridEPBuffer=WideHybridEPBuffer)})
token_dispatcher.hybrid_ep_dispatch, token_dispatcher.hybrid_ep_combine = (
    fused.hybrid_ep_dispatch,
    fused.hybrid_ep_combine,
)

T, E = 512, 4
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
config = SimpleNamespace(
    moe_permute_fusion=False, moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False,
    moe_expert_rank_capacity_factor=1.0, moe_hybridep_pad_uneven_dispatch_inputs=False,
    moe_hybridep_pad_variable_tokens=False, moe_router_topk=1, moe_flex_dispatcher_num_sms=None,
    moe_hybridep_num_blocks_permute=None, moe_hybridep_num_blocks_unpermute=None,
    moe_permute_fusion_into_hybridep=False, moe_hybridep_num_sms_preprocessing=None, fp8="e4m3", fp8_recipe="mxfp8",
    fp4=None, use_transformer_engine_op_fuser=True, moe_use_grouped_tensor=False, use_kitchen=False,
)  # fmt: skip
if not hasattr(token_dispatcher.MoEFlexTokenDispatcher, "check_over_budget"):
    print("not there: this Megatron-Core has no receive budget")
    sys.exit(77)
manager = token_dispatcher._HybridEPManager(dist.group.WORLD, E, E, config)
chosen = torch.nn.functional.one_hot(torch.arange(T) % E, E).bool()
manager.setup_metadata(chosen, chosen * 0.5)
manager.dispatch(torch.ones(T, 4))
delivered = int(manager.handle.tokens_per_expert.sum())  # without the padding
print(f"observed: {delivered} of 512 rows are delivered, over budget: {bool(manager.over_budget)}")
print("expected: 512 of 512 rows are delivered, over budget: False")
dist.destroy_process_group()
sys.exit(int(delivered < T))
