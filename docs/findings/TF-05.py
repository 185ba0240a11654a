"""TF-05: with grouped_mm experts an empty slot of one token changes the outputs of the others.

The second of three tokens has the id 2, and then -1. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

torch.manual_seed(0)
config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4)
config._experts_implementation = "grouped_mm"
experts = Qwen3MoeExperts(config)
for parameter in experts.parameters():
    torch.nn.init.normal_(parameter)
x, weights = torch.randn(3, 32), torch.ones(3, 1)
try:
    with torch.no_grad():
        full = experts(x, torch.tensor([[1], [2], [0]]), weights)
        gap = experts(x, torch.tensor([[1], [-1], [0]]), weights)
    changed = [t for t in (0, 2) if not torch.allclose(full[t], gap[t], atol=1e-3)]
    observed = f"accepted, and the outputs of tokens {changed} change"
except (RuntimeError, ValueError, IndexError) as error:
    observed, changed = f"refused: {error}", []
print(f"observed: an id of -1 for token 1 is {observed}")
print("expected: an id of -1 for token 1 is refused, or accepted, and the outputs of tokens [] change")
sys.exit(int(bool(changed)))
