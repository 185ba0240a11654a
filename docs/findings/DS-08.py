"""DS-08: with one choice, fewer tokens than min_capacity raise, although none is dropped. Exits 1 while it is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

torch.manual_seed(0)
found = {}
for k in (1, 2, 3):
    gate = TopKGate(8, 4, k=k, min_capacity=4, drop_tokens=False, top2_2nd_expert_sampling=False)
    try:
        gate(torch.randn(3, 8), None, True)
        found[k] = "routes"
    except AssertionError:
        found[k] = "raises"
print(
    "observed: a gate with drop_tokens=False, min_capacity=4",
    ", ".join(f"{w} 3 tokens with k = {k}" for k, w in found.items()),
)
print("expected: a gate with drop_tokens=False, min_capacity=4 routes 3 tokens with every k")
sys.exit(int("raises" in found.values()))
