"""DS-02: the loss averages the scores of tokens that are not used. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.sharded_moe import TopKGate

torch.manual_seed(0)
gate = TopKGate(8, 4, k=1, min_capacity=0, drop_tokens=False)
x, used = torch.randn(6, 8), torch.tensor([1, 1, 1, 0, 0, 0])
other = torch.cat([x[:3], -3 * x[3:]])
losses = [float(gate(each, used, True)[0].detach()) for each in (x, other)]
alone = float(gate(x[:3], None, True)[0].detach())
print(f"observed: the loss of 3 used tokens is {losses[0]:.4f} beside 3 unused ones, {losses[1]:.4f} beside 3 others")
print(f"expected: the loss of 3 used tokens is {alone:.4f}, that of these tokens alone, beside any others")
sys.exit(int(abs(losses[0] - alone) > 1e-3 or abs(losses[1] - alone) > 1e-3))
