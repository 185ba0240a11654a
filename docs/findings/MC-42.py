"""MC-42: num_moe_experts = 0 is refused with a message that allows 0. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

from megatron.core.transformer.transformer_config import TransformerConfig

try:
    TransformerConfig(
        num_moe_experts=0, moe_ffn_hidden_size=16, num_layers=1, hidden_size=32, num_attention_heads=1
    )  # fmt: skip
    observed = "accepted"
except ValueError as error:
    observed = str(error)
print(f"observed: num_moe_experts = 0: {observed}")
print("expected: num_moe_experts = 0: accepted, or a message that excludes 0")
sys.exit(int("non-negative" in observed))
