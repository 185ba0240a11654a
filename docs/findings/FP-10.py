"""FP-10: forwards in evaluation and without gradients are counted as load of the expert bias.

Four tokens through an MoE module, in evaluation, and in training under no_grad. Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common import moe
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

torch.manual_seed(0)
module = moe.MoE.Config(
    num_experts=4,
    experts=moe.GroupedExperts.Config(
        dim=8, hidden_dim=8, num_experts=4, use_grouped_mm=False,
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=1),
    ),
    # Forced load balance has no part in it: of integers torch counts no histogram on CPU.
    router=moe.TokenChoiceTopKRouter.Config(
        num_experts=4, gate=Linear.Config(in_features=8, out_features=4), _debug_force_load_balance=True
    ),
).build()  # fmt: skip
for parameter in module.parameters():
    torch.nn.init.normal_(parameter)
module._init_self_buffers(buffer_device=torch.device("cpu"))
counted = {}
for mode in ("evaluation", "training"):
    module.train(mode == "training")
    module.tokens_per_expert.zero_()
    with torch.no_grad():
        module(torch.randn(1, 4, 8))
    counted[mode] = int(module.tokens_per_expert.sum())
found = f"{counted['evaluation']} in evaluation, {counted['training']} in training"
print(f"observed: tokens counted without gradients: {found}")
print("expected: tokens counted without gradients: 0 in evaluation, 0 in training")
sys.exit(int(any(counted.values())))
