"""FP-08: shortcuts of experts that are taken are counted, and those that are not taken are not.

Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import os
import sys

os.environ["TT_MOE_DEBUG_FASTPATHS"] = "all"
import torch
from torchtitan.models.common import token_dispatcher
from torchtitan.models.common.moe import GroupedExperts

experts = GroupedExperts.Config(
    dim=8, hidden_dim=8, num_experts=2, use_grouped_mm=False,
    token_dispatcher=token_dispatcher.LocalTokenDispatcher.Config(num_experts=2, top_k=1),
).build()  # fmt: skip
found = []
for counts in ([2, 2], [3, 1]):
    token_dispatcher._MOE_FASTPATH_COUNTERS.clear()
    with torch.no_grad():
        experts._experts_forward(torch.randn(4, 8), counts)
    found.append(sum(n for name, n in token_dispatcher._MOE_FASTPATH_COUNTERS.items() if "experts" in name))
os.environ.pop("TT_MOE_DEBUG_FASTPATHS")
print(f"observed: decisions that are counted: {found[0]} where it is taken, {found[1]} where it is not")
print("expected: decisions that are counted: 1 where it is taken, 1 where it is not")
sys.exit(int(found != [1, 1]))
