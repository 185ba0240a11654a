"""TT-18: sizes of a router are not tested while it is built. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

built = []
for E, K, groups, chosen in (
    (8, 9, None, None), (8, 0, None, None), (0, 1, None, None),
    (10, 2, 4, 2), (8, 2, 4, 5), (8, 2, 4, 0), (8, 5, 4, 2), (8, 2, 4, None), (8, 2, None, 2),
):  # fmt: skip
    try:
        TokenChoiceTopKRouter.Config(
            num_experts=E, gate=Linear.Config(in_features=8, out_features=E), top_k=K,
            num_expert_groups=groups, num_limited_groups=chosen,
        ).build()  # fmt: skip
        built.append((E, K, groups, chosen))
    except (AssertionError, ValueError):
        pass
print(f"observed: {len(built)} of 9 routers are built whose E, K, groups and groups chosen do not fit")
print("expected: 0 of 9 routers are built whose E, K, groups and groups chosen do not fit")
sys.exit(int(bool(built)))
