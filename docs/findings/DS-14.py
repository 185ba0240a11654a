"""DS-14: without random token selection torch.topk decides which tokens are dropped. Exits 1 while it is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

x = torch.ones(64, 8)
gate = TopKGate(8, 2, k=1, capacity_factor=0.25, min_capacity=0, use_rts=False)
with torch.no_grad():
    gate.wg.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 8))
ids = gate(x, None, True)[3][0]
kept = [token for token in range(64) if ids[token] == 0]
print(f"observed: of 64 equal tokens for one expert with 8 places, 8 are kept; the first 8: {kept == list(range(8))}")
print("expected: of 64 equal tokens for one expert with 8 places, 8 are kept; the first 8: True")
sys.exit(int(kept != list(range(8))))
