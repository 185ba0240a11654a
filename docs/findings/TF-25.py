"""TF-25: DeepSeek-V2's router masks experts of other groups with 0, which is no less than a score that underflows.

Two experts are selected of the best of two groups, in which one has a score of 0. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

options = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
config = DeepseekV2Config(hidden_size=32, topk_method="group_limited_greedy", **options)
router = DeepseekV2TopkRouter(config)
with torch.no_grad():
    router.weight.copy_(torch.eye(4, 32))
logits = [-200.0, 0.0, -1.0, -2.0]  # the scores are 0, 0.67, 0.24 and 0.09; the best group is that of experts 0 and 1
selected = sorted(router(torch.tensor([logits + [0.0] * 28]))[2].flatten().tolist())
print("observed: of the groups [0, 1] and [2, 3], where expert 1 has the best score, selected are", selected)
print("expected: of the groups [0, 1] and [2, 3], where expert 1 has the best score, selected are [0, 1]")
sys.exit(int(selected != [0, 1]))
