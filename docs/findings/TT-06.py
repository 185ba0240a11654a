"""TT-06: on CPU the scores of the router stay in bfloat16. Exits 1 while the finding is there."""

from __future__ import annotations

import sys
import warnings

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

gate = Linear.Config(in_features=32, out_features=8)
router = TokenChoiceTopKRouter.Config(num_experts=8, gate=gate, top_k=2).build().bfloat16()
torch.nn.init.normal_(router.gate.weight)
with warnings.catch_warnings(record=True):
    scores = router(torch.randn(1, 3, 32, dtype=torch.bfloat16))[0]
print(f"observed: scores of bfloat16 tokens are {scores.dtype}")
print("expected: scores of bfloat16 tokens are torch.float32, as the code says of its autocast")
sys.exit(int(scores.dtype != torch.float32))
