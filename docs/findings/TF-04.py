"""TF-04: routing in float64 is accurate to float32 only. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

torch.manual_seed(0)
config = Qwen3MoeConfig(hidden_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False)
router = Qwen3MoeTopKRouter(config).double()
torch.nn.init.normal_(router.weight)
x = torch.randn(500, 32, dtype=torch.float64)
_, weights, ids = router(x)
error = (weights - torch.nn.functional.linear(x, router.weight).softmax(1).gather(1, ids)).abs().max().item()
print(f"observed: the weights are {weights.dtype}, and correct to 1e-9: {error < 1e-9}, to 1e-6: {error < 1e-6}")
print(f"expected: the weights are {weights.dtype}, and correct to 1e-9: True, to 1e-6: True")
sys.exit(int(error >= 1e-9))
