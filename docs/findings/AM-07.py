"""AM-07: the root of an underflowed softplus has a gradient of NaN. Exits 1 while the finding is there."""

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

gate = Gate(MoEConfig(**OPTIONS | {"score_func": "sqrtsoftplus"}))
with torch.no_grad():
    gate.weight.copy_(torch.eye(4))
x = torch.tensor([[1.0, 0.0, 0.0, -200.0]], requires_grad=True)  # the softplus of -200 is 0 in float32
gate(x, torch.ones(1, dtype=torch.bool), None)[0].sum().backward()
finite = [bool(value.isfinite()) for value in x.grad.flatten()]
print(f"observed: the gradient of a token with logits 1, 0, 0 and -200 is finite: {finite}")
print("expected: the gradient of a token with logits 1, 0, 0 and -200 is finite: [True, True, True, True]")
sys.exit(int(not all(finite)))
