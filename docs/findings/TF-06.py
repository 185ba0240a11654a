"""TF-06: eager GPT-OSS experts raise on the id of another rank's expert. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

config = GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=4)
config._experts_implementation = "eager"
experts = GptOssExperts(config)
experts._is_expert_parallel = True
for parameter in experts.parameters():
    torch.nn.init.zeros_(parameter)
try:
    # AllReduceEP writes the number of local experts, 4, for an expert of another rank.
    y = experts(torch.randn(2, 32), torch.tensor([[1], [4]]), torch.tensor([[1.0], [0.0]]))
    observed = f"output of shape {tuple(y.shape)}"
except (RuntimeError, IndexError) as error:
    observed = f"{type(error).__name__}: {error}"
print(f"observed: {observed}")
print("expected: output of shape (2, 32)")
sys.exit(int(observed != "output of shape (2, 32)"))
