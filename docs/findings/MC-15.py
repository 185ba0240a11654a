"""MC-15: the drop policy by position keeps the last tokens on CPU. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

probs, chosen = torch.full((8, 1), 0.5), torch.ones(8, 1, dtype=torch.bool)
_, kept = apply_router_token_dropping(probs, chosen, router_topk=1, capacity_factor=0.5, drop_policy="position")
observed = kept.flatten().nonzero().flatten().tolist()
print(f"observed: of tokens 0 to 7 of one expert, which has a capacity of 4, {observed} are kept")
print("expected: of tokens 0 to 7 of one expert, which has a capacity of 4, [0, 1, 2, 3] are kept")
sys.exit(int(observed != [0, 1, 2, 3]))
