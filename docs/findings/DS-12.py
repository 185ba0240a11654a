"""DS-12: routers compute scores in float32, whatever the dtype of the tokens. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.moe.sharded_moe import TopKGate

torch.manual_seed(0)
x = torch.randn(6, 8, dtype=torch.float64)
router = TokenChoiceTopKRouter(8, 4, None, None, 2, "softmax", False, 1.0, False).double()
gate = TopKGate(8, 4, k=1, min_capacity=0, drop_tokens=False).double()
types = {"TokenChoiceTopKRouter": router(x)[0].dtype, "TopKGate": gate(x, None, True)[5].dtype}
print("observed: weights of float64 tokens are of", ", ".join(f"{t} from {name}" for name, t in types.items()))
print("expected: weights of float64 tokens are of torch.float64")
sys.exit(int(any(t != torch.float64 for t in types.values())))
