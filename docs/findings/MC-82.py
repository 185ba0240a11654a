"""MC-82: sizes of group-limited routing that do not fit are accepted. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

from megatron.core.transformer.transformer_config import TransformerConfig

accepted = []
for K, groups, chosen in ((2, 4, 0), (5, 4, 2), (2, 4, None)):
    try:
        TransformerConfig(
            num_layers=1, num_attention_heads=1, hidden_size=32, add_bias_linear=False, num_moe_experts=8,
            moe_ffn_hidden_size=16, moe_router_topk=K, moe_router_num_groups=groups, moe_router_group_topk=chosen,
        )  # fmt: skip
        accepted.append(f"K = {K} from {chosen} of {groups} groups")
    except (AssertionError, ValueError):
        pass
print(f"observed: of 8 experts: accepted are {'; '.join(accepted) or 'none'}")
print("expected: of 8 experts: accepted are none")
sys.exit(int(bool(accepted)))
