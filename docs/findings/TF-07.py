"""TF-07: DeepSeek-V3's router selects from masked groups, where the selected ones have fewer experts than K.

Four experts are selected of one group of two. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

torch.manual_seed(0)
config = DeepseekV3Config(hidden_size=32, n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=1)
try:
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    ids = router(torch.randn(3, 32))[2]
    most = max(len(set((token // 2).tolist())) for token in ids)
    observed = f"accepted; the experts of a token are of {'one group' if most == 1 else 'more than one group'}"
except ValueError as error:
    observed = f"refused: {error}"
print(f"observed: {observed}")
print("expected: refused, or the experts of a token are of one group")
sys.exit(int(observed.endswith("more than one group")))
