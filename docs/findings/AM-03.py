"""AM-03: experts raise where no rank of their group has a token. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExperts

OPTIONS = {
    "n_routed_experts": 4, "n_shared_experts": 0, "n_activated_experts": 1, "n_expert_groups": 1, "n_limited_groups": 1,
    "train_gate": True, "gate_bias_update_factor": 0.0, "aux_loss_coeff": 0.0, "score_func": "softmax",
    "route_scale": 1.0, "dim": 8, "inter_dim": 8, "moe_inter_dim": 8, "norm_topk_prob": False, "dtype": torch.float32,
}  # fmt: skip

torch.compiler.set_stance("force_eager")
found = []
for products in ("torch", "torch_mm"):
    experts = GroupedExperts(MoEConfig(**OPTIONS), BackendConfig(experts=products, dispatcher="torch"))
    x, mask = torch.zeros(0, 8), torch.ones(0, dtype=torch.bool)
    try:
        y = experts(x, mask, torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.int64))
        found.append(f"{products} returns {tuple(y.shape)}")
    except IndexError as error:
        found.append(f"{products} raises IndexError: {error}")
print("observed: of no tokens", "; ".join(found))
print("expected: of no tokens torch returns (0, 8); torch_mm returns (0, 8)")
sys.exit(int(found != ["torch returns (0, 8)", "torch_mm returns (0, 8)"]))
