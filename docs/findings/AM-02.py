"""AM-02: a gate masks the experts of other groups with 0, which is more than a score with a negative correction.

Two experts are selected of the best of two groups, with a correction as a long training makes it. Exits 1 while the
finding is there.
"""

from __future__ import annotations

import sys

import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate

OPTIONS = {
    "n_routed_experts": 4, "n_shared_experts": 0, "n_activated_experts": 2, "n_expert_groups": 2, "n_limited_groups": 1,
    "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "route_scale": 1.0, "dim": 4,
    "inter_dim": 8, "moe_inter_dim": 8, "norm_topk_prob": True, "dtype": torch.float32,
    "force_e_score_correction_bias": True,
}  # fmt: skip

found = {}
for score_func in ("sigmoid", "softmax_with_bias", "sigmoid_with_bias"):
    gate = Gate(MoEConfig(**OPTIONS, score_func=score_func))
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    gate.e_score_correction_bias.copy_(torch.tensor([0.0, -0.9, -0.9, -0.9]))
    logits = torch.tensor([[2.0, 0.0, 0.0, 0.0]])  # the best group is that of experts 0 and 1
    found[score_func] = sorted(gate(logits, torch.ones(1, dtype=torch.bool), None)[1].flatten().tolist())
words = ", ".join(f"{ids} with {score_func}" for score_func, ids in found.items())
print(f"observed: of the groups [0, 1] and [2, 3], where the first is the best, selected are {words}")
print("expected: of the groups [0, 1] and [2, 3], where the first is the best, selected are [0, 1] with each")
sys.exit(int(any(ids != [0, 1] for ids in found.values())))
