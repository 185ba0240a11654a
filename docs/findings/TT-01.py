"""TT-01: experts compute in bfloat16, whatever the dtype of the tokens. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.moe import GroupedExperts

torch.manual_seed(0)
experts = GroupedExperts.Config(dim=32, hidden_dim=16, num_experts=1).build()
for parameter in experts.parameters():
    torch.nn.init.normal_(parameter)
x = torch.randn(6, 32)
same = torch.equal(experts(x, torch.tensor([6])), experts(x.bfloat16().float(), torch.tensor([6])))
print("observed: rounding float32 tokens to bfloat16 beforehand changes", "nothing" if same else "the output")
print("expected: rounding float32 tokens to bfloat16 beforehand changes the output")
sys.exit(int(same))
