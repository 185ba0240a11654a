"""MC-84: overlap of shared experts is accepted where there are none. Exits 1 while the finding is there."""

from __future__ import annotations

import sys
import warnings

from megatron.core.transformer.transformer_config import TransformerConfig

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=32, add_bias_linear=False, num_moe_experts=8,
        moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", moe_shared_expert_overlap=True,
    )  # fmt: skip
said = [each for each in told if "shared" in str(each.message)]
print(f"observed: moe_shared_expert_overlap is {config.moe_shared_expert_overlap}, and {len(said)} warnings tell of it")
print("expected: an error, or False with a warning: there are no shared experts")
sys.exit(int(config.moe_shared_expert_overlap and not said))
