"""MF-01: with padding on and uneven counts, HybridEP's padding to a capacity hands rows to the wrong expert.

Eight tokens, padded to 64, on a group of one rank, and a map that the router has filled up to its capacity of four. The
kernel is a stand-in. Exits 1 while the finding is there.
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

T, E = 8, 2
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
config = SimpleNamespace(
    moe_permute_fusion=False, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True,
    moe_expert_rank_capacity_factor=None, moe_hybridep_pad_uneven_dispatch_inputs=True,
    moe_hybridep_pad_variable_tokens=True, moe_router_topk=1, moe_flex_dispatcher_num_sms=None,
    moe_hybridep_num_blocks_permute=None, moe_hybridep_num_blocks_unpermute=None,
    moe_permute_fusion_into_hybridep=False, moe_hybridep_num_sms_preprocessing=None, fp8=None, fp4=None,
    use_transformer_engine_op_fuser=False, moe_use_grouped_tensor=False, use_kitchen=False,
)  # fmt: skip
if not hasattr(fused_a2a, "HYBRIDEP_TOKEN_ALIGNMENT"):
    print("not there: this Megatron-Core pads no token counts")
    sys.exit(77)
manager = token_dispatcher._HybridEPManager(dist.group.WORLD, E, E, config)
expert_T = torch.arange(T) % E
chosen = torch.nn.functional.one_hot(expert_T, E).bool()
manager.setup_metadata(chosen, chosen * 0.5)
rows = manager.dispatch(1.0 + expert_T[:, None].expand(T, 4))  # a row says which expert it is for, from 1 on
counts = manager.get_number_of_tokens_per_expert().tolist()
handed = [int(part[:, 0].eq(expert + 1.0).sum()) for expert, part in enumerate(rows.split(counts))]
print(f"observed: experts 0 and 1 get {handed[0]} and {handed[1]} of their four rows each")
print("expected: experts 0 and 1 get 4 and 4 of their four rows each")
dist.destroy_process_group()
sys.exit(int(handed != [4, 4]))
