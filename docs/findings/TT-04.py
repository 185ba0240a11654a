"""TT-04: a group limit that cannot hold K experts is broken silently.

Four experts are selected of one group of two. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

torch.manual_seed(0)
try:
    router = TokenChoiceTopKRouter.Config(
        num_experts=8, gate=Linear.Config(in_features=32, out_features=8), top_k=4, num_expert_groups=4,
        num_limited_groups=1, score_func="sigmoid",
    ).build()  # fmt: skip
    torch.nn.init.normal_(router.gate.weight)
    ids = router(torch.randn(1, 3, 32))[1]
    most = max(len(set((token // 2).tolist())) for token in ids.flatten(0, 1))
    observed = f"accepted; the experts of a token are of {'one group' if most == 1 else 'more than one group'}"
except ValueError as error:
    observed = f"refused: {error}"
print(f"observed: {observed}")
print("expected: refused, or the experts of a token are of one group")
sys.exit(int(observed.endswith("more than one group")))
