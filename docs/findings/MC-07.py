"""MC-07: the gating function of the router raises on a rank without tokens. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe import moe_utils

moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
try:
    logits = moe_utils.router_gating_linear(torch.randn(0, 1, 4), torch.randn(3, 4), None, torch.float32)
    observed = f"logits of shape {tuple(logits.shape)}"
except RuntimeError as error:
    observed = f"RuntimeError: {str(error).split(' because')[0]}"
print(f"observed: {observed}")
print("expected: logits of shape (0, 1, 3)")
sys.exit(int(observed != "logits of shape (0, 1, 3)"))
