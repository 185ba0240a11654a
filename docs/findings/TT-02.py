"""TT-02: combine computes float64 tokens in float32.

The experts are the identity, and all weights one. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

torch.manual_seed(0)
dispatcher = LocalTokenDispatcher.Config(num_experts=4, top_k=1).build()
x, ids = torch.randn(50, 8, dtype=torch.float64), torch.arange(50)[:, None] % 4
weights, counts = torch.ones(50, 1, dtype=torch.float64), torch.bincount(ids.flatten(), minlength=4)
rows, _, metadata = dispatcher.dispatch(x, weights, ids, counts)
y = dispatcher.combine(rows, metadata, x)
exact, rounded = torch.equal(y, x), torch.equal(y, x.float().double())
print("observed: the output of float64 tokens is", "exact" if exact else "rounded to float32" if rounded else "inexact")
print("expected: the output of float64 tokens is exact")
sys.exit(int(not exact))
