"""DS-01: with more than one choice the mask of used tokens is ignored. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

torch.manual_seed(0)
x, used = torch.randn(6, 8), torch.tensor([1, 1, 1, 0, 0, 0])
found = {}
for k in (1, 2, 3):
    gate = TopKGate(8, 4, k=k, min_capacity=0, drop_tokens=False, top2_2nd_expert_sampling=False)
    exp_counts = gate(x, used, True)[-1]
    found[k] = int(exp_counts.sum())
print(
    "observed: slots of 3 used tokens of 6 that are counted:", ", ".join(f"{n} with k = {k}" for k, n in found.items())
)
print("expected: slots of 3 used tokens of 6 that are counted: 3 with k = 1, 6 with k = 2, 9 with k = 3")
sys.exit(int(found != {1: 3, 2: 6, 3: 9}))
