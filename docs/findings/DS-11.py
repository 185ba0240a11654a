"""DS-11: a capacity is computed in float32, and a whole number may be rounded up. Exits 1 while it is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

gate = TopKGate(8, 2, k=1, capacity_factor=1.2, min_capacity=0)
capacity = int(gate(torch.zeros(25, 8), None, True)[1])
print(f"observed: 25 tokens, 2 experts and capacity_factor 1.2 have the capacity {capacity}")
print("expected: 25 tokens, 2 experts and capacity_factor 1.2 have the capacity 15")
sys.exit(int(capacity != 15))
