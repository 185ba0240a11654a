"""FP-09: forced load balance gives the remainders of all ranks to the same experts.

Two ranks force 9 tokens each to 4 of 24 experts; a router needs no other rank. Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

torch.manual_seed(0)
loads = torch.zeros(24, dtype=torch.int64)
for _ in range(2):  # a rank each
    router = TokenChoiceTopKRouter.Config(
        num_experts=24, gate=Linear.Config(in_features=8, out_features=24), top_k=4, _debug_force_load_balance=True
    ).build()
    torch.nn.init.normal_(router.gate.weight)
    loads += router(torch.randn(9, 8))[2]
print(f"observed: of two ranks with 36 slots each, an expert gets {int(loads.min())} to {int(loads.max())}")
print("expected: of two ranks with 36 slots each, an expert gets 3 to 3")
sys.exit(int(loads.min() != loads.max()))
