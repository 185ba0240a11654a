"""TF-40: a model with more choices than experts is built. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 1}
heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
try:
    Qwen3MoeModel(Qwen3MoeConfig(num_experts=8, num_experts_per_tok=9, **sizes, **heads))
    built = True
except ValueError:
    built = False
print(f"observed: a model of 8 experts with 9 choices is {'built' if built else 'refused'}")
print("expected: a model of 8 experts with 9 choices is refused")
sys.exit(int(built))
