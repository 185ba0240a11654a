"""MC-04: the gating function of the router raises a NameError without Transformer Engine.

Exits 1 while the finding is there. To be run where Transformer Engine is not installed.
Needs: megatron-core<0.17
"""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear

try:
    observed = tuple(router_gating_linear(torch.randn(2, 1, 4), torch.randn(3, 4), None, torch.float32).shape)
except NameError as error:
    observed = f"NameError: {error}"
print(f"observed: {observed}")
print("expected: (2, 1, 3)")
sys.exit(int(observed != (2, 1, 3)))
