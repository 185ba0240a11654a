"""AM-08: a gate with groups raises on a rank without tokens. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate

OPTIONS = {
    "n_routed_experts": 4, "n_shared_experts": 0, "n_activated_experts": 1, "n_expert_groups": 1, "n_limited_groups": 1,
    "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "score_func": "sigmoid",
    "route_scale": 1.0, "dim": 4, "inter_dim": 8, "moe_inter_dim": 8, "norm_topk_prob": False, "dtype": torch.float32,
}  # fmt: skip

found = []
for groups in (1, 2):
    gate = Gate(MoEConfig(**OPTIONS | {"n_expert_groups": groups}))
    try:
        gate(torch.zeros(0, 4), torch.ones(0, dtype=torch.bool), None)
        found.append(f"{groups} groups returns")
    except RuntimeError:
        found.append(f"{groups} groups raises")
print("observed: without tokens a gate with", ", with ".join(found))
print("expected: without tokens a gate with 1 groups returns, with 2 groups returns")
sys.exit(int(any("raises" in words for words in found)))
