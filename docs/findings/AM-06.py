"""AM-06: the scores of an auxiliary loss are not divided by their sum. Exits 1 while the finding is there."""

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
cases = (("sigmoid", 1, True), ("sigmoid", 2, False), ("sqrtsoftplus", 2, False), ("softmax", 1, True))
for score_func, K, normalise in cases:
    options = {"aux_loss_coeff": 1.0, "score_func": score_func, "n_activated_experts": K, "norm_topk_prob": normalise}
    gate = Gate(MoEConfig(**OPTIONS | options, softmax_before_topk=True))
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    balanced = torch.eye(4) + torch.eye(4).roll(1, 1)  # every expert is selected K times
    loss = gate(balanced, torch.ones(4, dtype=torch.bool), None)[2]
    words = f"{float(loss):.3f} with {score_func}, K = {K}, norm_topk_prob={normalise}"
    found.append((words, abs(float(loss) - 1) < 1e-5))
print("observed: the loss of balanced tokens is", "; ".join(words for words, _ in found))
print("expected: the loss of balanced tokens is 1.000 with each")
sys.exit(int(not all(right for _, right in found)))
