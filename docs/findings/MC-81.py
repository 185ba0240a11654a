"""MC-81: a router with K beyond E, or K = 0, is built. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

from megatron.core.transformer.transformer_config import TransformerConfig

accepted = []
for K in (9, 0):
    try:
        TransformerConfig(
            num_layers=1, num_attention_heads=1, hidden_size=32, add_bias_linear=False, num_moe_experts=8,
            moe_ffn_hidden_size=16, moe_router_topk=K,
        )  # fmt: skip
        accepted.append(K)
    except (AssertionError, ValueError):
        pass
print(f"observed: of 8 experts moe_router_topk = 9 and 0: accepted are {accepted}")
print("expected: of 8 experts moe_router_topk = 9 and 0: accepted are []")
sys.exit(int(bool(accepted)))
