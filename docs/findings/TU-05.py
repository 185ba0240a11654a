"""TU-05: a layer raises for tokens that are not contiguous. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from tutel import moe

layer = moe.moe_layer(
    {"type": "top", "k": 1, "capacity_factor": 0},
    8,
    {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8},
)
try:
    layer(torch.randn(8, 4).T)
    found = "returns"
except AssertionError as error:
    found = f"raises: {error}"
print("observed: a layer called with the transpose of a tensor", found)
print("expected: a layer called with the transpose of a tensor returns")
sys.exit(int(found != "returns"))
