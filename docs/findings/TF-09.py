"""TF-09: batched_mm experts multiply the tokens of other ranks by zero, and zero times NaN is NaN.

The second of two tokens is NaN, and routed to another rank's expert. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

torch.manual_seed(0)
observed = {}
for implementation in ("eager", "grouped_mm", "batched_mm"):
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4)
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config)
    experts._is_expert_parallel = True
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 32)
    x[1] = torch.nan
    # 4, the number of local experts: what AllReduceEP writes for an expert of another rank.
    y = experts(x, torch.tensor([[0], [4]]), torch.tensor([[1.0], [0.0]]))
    y[0].sum().backward()
    finite = all(parameter.grad.isfinite().all() for parameter in experts.parameters())
    observed[implementation] = "finite" if finite else "not finite"
print(f"observed: the gradients of the experts are {observed}")
print(f"expected: the gradients of the experts are {dict.fromkeys(observed, 'finite')}")
sys.exit(int("not finite" in observed.values()))
