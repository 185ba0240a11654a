"""FP-06: experts whose weights were made in inference mode cannot be called in it.

Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

with torch.inference_mode():
    experts = GroupedExperts.Config(
        dim=8, hidden_dim=8, num_experts=2, use_grouped_mm=False,
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=2, top_k=1),
    ).build()  # fmt: skip
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    ids, counts = torch.arange(4)[:, None] % 2, torch.tensor([2, 2])
    try:
        experts(torch.randn(4, 8), torch.ones(4, 1), ids, counts)
        observed = "returns"
    except RuntimeError as error:
        observed = f"raises: {str(error).splitlines()[0]}"
print(f"observed: a forward in inference mode {observed}")
print("expected: a forward in inference mode returns")
sys.exit(int(observed != "returns"))
