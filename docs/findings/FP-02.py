"""FP-02: experts without gradients go on with weights from before a change that no version counter records.

Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

torch.manual_seed(0)
experts = GroupedExperts.Config(
    dim=8, hidden_dim=8, num_experts=2, use_grouped_mm=False,
    token_dispatcher=LocalTokenDispatcher.Config(num_experts=2, top_k=1, score_before_experts=False),
).build()  # fmt: skip
for parameter in experts.parameters():
    torch.nn.init.normal_(parameter)
x, weights, ids, counts = torch.randn(4, 8), torch.ones(4, 1), torch.arange(4)[:, None] % 2, torch.tensor([2, 2])
with torch.no_grad():
    before = experts(x, weights, ids, counts)
    experts.w2.data.copy_(2 * experts.w2)
    after = experts(x, weights, ids, counts)
trained = experts(x, weights, ids, counts).detach()
grown = [float((out / before).mean()) for out in (after, trained)]
print(
    "observed: with weights doubled by .data.copy_, outputs grow by {:.1f} without gradients, {:.1f} with".format(
        *grown
    )
)
print("expected: with weights doubled by .data.copy_, outputs grow by 2.0 without gradients, 2.0 with")
sys.exit(int(not torch.allclose(after, trained)))
