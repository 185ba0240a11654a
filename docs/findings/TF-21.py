"""TF-21: batched_mm experts add up the gradients of their weights in bfloat16, one a token.

300 tokens of one expert; eager experts run the same tokens in one product. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


def gradient(implementation: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of down_proj of the one expert, of the same numbers in any dtype."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=1)
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
        parameter.data = parameter.data.bfloat16().to(dtype)
    x, upstream = torch.randn(300, 8).bfloat16().to(dtype), torch.randn(300, 8).bfloat16().to(dtype)
    experts(x, torch.zeros(300, 1, dtype=torch.int64), torch.ones(300, 1, dtype=dtype)).backward(upstream)
    return experts.down_proj.grad[0].double()


exact = gradient("eager", torch.float64)
batched, eager = ((gradient(name, torch.bfloat16) - exact).abs().max() for name in ("batched_mm", "eager"))
worse = bool(batched > 3 * eager)
print("observed: in bfloat16 the error of batched_mm is", "more" if worse else "not more", "than 3 times that of eager")
print("expected: in bfloat16 the error of batched_mm is not more than 3 times that of eager")
sys.exit(int(worse))
