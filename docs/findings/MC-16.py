"""MC-16: padding to a capacity beyond the number of tokens raises. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, permute

chosen = torch.tensor([[True, False], [False, True], [True, False], [True, False]])  # T = 4, E = 2, K = 1
probs, filled = apply_router_token_dropping(chosen * 0.5, chosen, 1, 3.0, pad_to_capacity=True)  # a capacity of 6
try:
    rows = permute(torch.randn(4, 3), filled, probs=probs, num_out_tokens=6 * 2, drop_and_pad=True)[0]
    observed = f"rows of shape {tuple(rows.shape)}"
except RuntimeError as error:
    observed = f"RuntimeError: {error}"
print(f"observed: {observed}")
print("expected: rows of shape (12, 3)")
sys.exit(int(observed != "rows of shape (12, 3)"))
