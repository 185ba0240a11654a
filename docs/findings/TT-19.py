"""TT-19: under activation checkpointing a forward is counted twice as load: when it runs, and when it runs again.

Four tokens through an MoE module in training and back, by itself and in a block of which full activation checkpointing
runs the forward again. Exits 1 while the finding is there.
"""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor, nn
from torchtitan.distributed import utils
from torchtitan.distributed.activation_checkpoint import FullAC
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


class Block(nn.Module):
    """A block that has only the MoE module."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the module."""
        y: Tensor = self.moe(x)
        return y


model = nn.Module()
model.layers = nn.ModuleDict({"0": Block()})
FullAC.Config().build().apply(model)
shape = (4, 8) if "x_TD" in inspect.signature(module.forward).parameters else (1, 4, 8)  # 0.3.0 takes a batch
counted = []
for forward in (module, model.layers["0"]):
    module.tokens_per_expert_E.zero_()
    forward(torch.randn(shape, requires_grad=True)).sum().backward()
    counted.append(int(module.tokens_per_expert_E.sum()))
print(f"observed: tokens counted of 4: {counted[0]}, with activation checkpointing {counted[1]}")
print("expected: tokens counted of 4: 4, with activation checkpointing 4")
sys.exit(int(counted != [4, 4]))
