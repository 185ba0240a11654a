"""TT-17: a forward without gradients is counted as load of the expert bias where the module is in training.

Four tokens through an MoE module, in evaluation, and in training under no_grad. Exits 1 while the finding is there.
"""

from __future__ import annotations

import inspect
import sys

import torch
from torchtitan.distributed import utils
from torchtitan.models.common import moe
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

torch.manual_seed(0)
utils.set_spmd_backend("partial_dtensor")
module = moe.MoE.Config(
    num_experts=4,
    routed_experts=moe.RoutedExperts.Config(
        inner_experts=moe.GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=4),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=1),
    ),
    router=moe.TokenChoiceTopKRouter.Config(
        num_experts=4, gate=Linear.Config(in_features=8, out_features=4), top_k=1, score_func="sigmoid"
    ),
    load_balance_coeff=1e-3,
    shared_experts=None,
).build()
for parameter in module.parameters():
    torch.nn.init.normal_(parameter)
module._init_self_buffers(buffer_device=torch.device("cpu"))
counted = {}
shape = (4, 8) if "x_TD" in inspect.signature(module.forward).parameters else (1, 4, 8)  # 0.3.0 takes a batch
for mode in ("evaluation", "training"):
    module.train(mode == "training")
    with torch.no_grad():
        module(torch.randn(shape))
    counted[mode] = int(module.tokens_per_expert_E.sum())
found = f"{counted['evaluation']} in evaluation, {counted['training']} in training"
print(f"observed: tokens counted without gradients: {found}")
print("expected: tokens counted without gradients: 0 in evaluation, 0 in training")
sys.exit(int(any(counted.values())))
