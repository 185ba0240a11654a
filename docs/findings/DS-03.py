"""DS-03: a rank without tokens has a loss of NaN. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

torch.manual_seed(0)
found = {}
for k in (1, 2, 3):
    gate = TopKGate(8, 4, k=k, min_capacity=0, drop_tokens=False, top2_2nd_expert_sampling=False)
    found[k] = float(gate(torch.randn(0, 8), None, True)[0].detach())
print("observed: the loss without tokens is", ", ".join(f"{loss} with k = {k}" for k, loss in found.items()))
print("expected: the loss without tokens is 0.0")
sys.exit(int(any(loss != 0 for loss in found.values())))
