"""AM-04: the update of a correction bias raises where the gate has not counted. Exits 1 while the finding is there."""

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

gate = Gate(MoEConfig(**OPTIONS | {"gate_bias_update_factor": 0.1}))
try:
    gate.update_bias()
    word = "returns"
except AssertionError as error:
    word = f"raises: {error}"
print("observed: an update behind no training forward", word)
print("expected: an update behind no training forward returns")
sys.exit(int(word != "returns"))
