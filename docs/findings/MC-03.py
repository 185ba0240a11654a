"""MC-03: routing in float64 is accurate to float32 only. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

torch.manual_seed(0)
logits = torch.randn(500, 8, dtype=torch.float64)  # what a router with moe_router_dtype="fp64" passes
probs, chosen = topk_routing_with_score_function(logits, 2, use_pre_softmax=True)
error = (probs - logits.softmax(1) * chosen).abs().max().item()
print(f"observed: the weights are {probs.dtype}, and correct to 1e-9: {error < 1e-9}, to 1e-6: {error < 1e-6}")
print(f"expected: the weights are {probs.dtype}, and correct to 1e-9: True, to 1e-6: True")
sys.exit(int(error >= 1e-9))
