"""FP-07: under no_grad, rows are added into an output that requires a gradient, and so does the result.

Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.token_dispatcher import _scatter_add_forward_or_autograd

x, weight = torch.ones(2, 2), torch.ones(2, requires_grad=True)
out = x * weight  # a shared expert's output, of a forward with gradients
with torch.no_grad():
    y = _scatter_add_forward_or_autograd(out, torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), x)
print(f"observed: a sum made under no_grad asks for a gradient: {y.requires_grad}; it is the output itself: {y is out}")
print("expected: a sum made under no_grad asks for a gradient: False; it is the output itself: False")
sys.exit(int(y.requires_grad))
