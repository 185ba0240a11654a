"""TF-02: grouped_mm experts raise in float64. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

observed = {}
for implementation in ("eager", "batched_mm", "grouped_mm"):
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4)
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config).double()
    try:
        experts(torch.randn(3, 32).double(), torch.tensor([[0], [1], [0]]), torch.ones(3, 1).double())
        observed[implementation] = "works"
    except RuntimeError as error:
        observed[implementation] = f"raises: {str(error).splitlines()[0]}"
print("observed:", "; ".join(f"{name} {text}" for name, text in observed.items()))
print("expected: eager works; batched_mm works; grouped_mm works")
sys.exit(int(set(observed.values()) != {"works"}))
