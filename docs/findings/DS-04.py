"""DS-04: by default routes are random in evaluation too. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

torch.manual_seed(0)
x, found = torch.randn(64, 8), {}
for k in (1, 2, 3):
    gate = TopKGate(8, 8, k=k).eval()
    first, second = gate(x, None, True), gate(x, None, True)
    found[k] = bool((first[3] != second[3]).any())
differ = [f"k = {k}" for k, other in found.items() if other]
print(
    "observed: two forwards of a gate in evaluation select or keep other experts with", " and ".join(differ) or "no k"
)
print("expected: two forwards of a gate in evaluation select or keep other experts with no k")
sys.exit(int(any(found.values())))
