"""AM-05: the update of a correction bias behind a load undoes the load. Exits 1 while the finding is there."""

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


def step(gate: Gate) -> None:
    """All tokens for expert 0, whose bias goes down by 1."""
    gate(torch.tensor([[9.0, 0.0, 0.0, 0.0]] * 4), torch.ones(4, dtype=torch.bool), None)
    gate.update_bias()


gate = Gate(MoEConfig(**OPTIONS | {"gate_bias_update_factor": 1.0}))
with torch.no_grad():
    gate.weight.copy_(torch.eye(4))
saved = {name: value.clone() for name, value in gate.state_dict().items()}  # all biases are 0
for _ in range(3):
    step(gate)
gate.load_state_dict(saved)
step(gate)
bias = float(gate.e_score_correction_bias[0])
print(f"observed: the bias of the busiest expert, one update behind a load of zeros, is {bias}")
print("expected: the bias of the busiest expert, one update behind a load of zeros, is -1.0")
sys.exit(int(bias != -1.0))
