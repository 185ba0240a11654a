"""MC-151: two ways to force routes are accepted together, and the later one overrides the earlier one.

`moe_router_force_load_balancing` and `moe_router_force_biased`. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
from dataclasses import fields

from megatron.core.transformer.transformer_config import TransformerConfig

if "moe_router_force_biased" not in {field.name for field in fields(TransformerConfig)}:
    print("not there: this Megatron-Core has no moe_router_force_biased")
    sys.exit(77)

try:
    TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=8,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_force_load_balancing=True,
        moe_router_force_biased=0.5,
    )
    refused = False
except (AssertionError, ValueError):
    refused = True

print(f"observed: uniformly random logits together with biased ones are {'refused' if refused else 'accepted'}")
print("expected: uniformly random logits together with biased ones are refused")
sys.exit(int(not refused))
