"""DS-13: a group limit that cannot hold k experts is broken silently. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.ep_router import TokenChoiceTopKRouter

torch.manual_seed(0)
# 4 groups of 2 experts, of which one is selected, and 3 experts for every token
router = TokenChoiceTopKRouter(8, 8, 4, 1, 3, "softmax", False, 1.0, False)
try:
    groups = router(torch.randn(4, 8))[1][0].div(2, rounding_mode="floor").unique().numel()
    found = f"the experts of a token are of {groups} groups"
except (ValueError, RuntimeError):
    found = "it is refused"
print("observed: with one group of 2 experts and top_k = 3", found)
print("expected: with one group of 2 experts and top_k = 3 it is refused")
sys.exit(int(found != "it is refused"))
