"""AM-09: the displayed loss is that of the last microbatch of one rank. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.load_balance_metrics import collect_expert_loads, enable_load_balance_tracking

OPTIONS = {
    "n_routed_experts": 4, "n_shared_experts": 0, "n_activated_experts": 1, "n_expert_groups": 1, "n_limited_groups": 1,
    "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "score_func": "sigmoid",
    "route_scale": 1.0, "dim": 4, "inter_dim": 8, "moe_inter_dim": 8, "norm_topk_prob": False, "dtype": torch.float32,
}  # fmt: skip

model = torch.nn.ModuleDict({"gate": Gate(MoEConfig(**OPTIONS | {"aux_loss_coeff": 1.0, "score_func": "softmax"}))})
with torch.no_grad():
    model["gate"].weight.copy_(torch.eye(4))
enable_load_balance_tracking(model)
losses = []
for x in (torch.eye(4), torch.eye(4)[:1].expand(4, 4)):  # balanced, then all tokens for expert 0
    losses.append(float(model["gate"](x, torch.ones(4, dtype=torch.bool), None)[2]))
displayed = float(collect_expert_loads(model)["gate"]["aux_loss"])
print(f"observed: of a step with losses {losses[0]:.4f} and {losses[1]:.4f} is displayed {displayed:.4f}")
print(f"expected: of a step with losses {losses[0]:.4f} and {losses[1]:.4f} is displayed {sum(losses) / 2:.4f}")
sys.exit(int(abs(displayed - sum(losses) / 2) > 1e-5))
