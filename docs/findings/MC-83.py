"""MC-83: the backend of the flex dispatcher is ignored by other dispatchers. Exits 1 while the finding is there."""

from __future__ import annotations

import sys
import warnings

from megatron.core.transformer.transformer_config import TransformerConfig

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=32, add_bias_linear=False, num_moe_experts=8,
        moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend="hybridep",
    )  # fmt: skip
said = [each for each in told if "dispatcher" in str(each.message)]
kept = config.moe_flex_dispatcher_backend
print(f"observed: with the all-to-all dispatcher the backend is {kept}, and {len(said)} warnings tell of it")
print("expected: an error, or a warning that it has no effect")
sys.exit(int(kept == "hybridep" and not said))
