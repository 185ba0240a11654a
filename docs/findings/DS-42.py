"""DS-42: with ZeRO 1 the states of experts cannot be read after the first step. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys
from tempfile import TemporaryDirectory

os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups, safe_get_full_optimizer_state
from torch import nn


def read(store: str) -> list[str]:
    """Train one step on one rank; return the parameters whose first moment can be read."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # DS-07
    deepspeed.init_distributed("gloo")
    groups._create_expert_and_data_parallel(1)
    layer = MoE(8, nn.Linear(8, 8, bias=False), num_experts=2, k=2, drop_tokens=False, use_rts=False)
    engine, *_ = deepspeed.initialize(
        model=layer,
        model_parameters=list(layer.parameters()),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        },
    )
    y, *_ = engine(torch.randn(1, 16, 8, dtype=torch.bfloat16))
    engine.backward(y.float().square().sum())
    engine.step()
    found = []
    for name, parameter in layer.named_parameters():
        try:
            safe_get_full_optimizer_state(parameter, "exp_avg")
            found.append("gate" if "gate" in name else "expert")
        except ValueError:
            pass  # not found in optimizer state fragment
    return found


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        found = read(f"{folder}/store")
    print(f"observed: the first moment can be read of {', '.join(found)}")
    print("expected: the first moment can be read of gate, expert, expert")
    sys.exit(int(found != ["gate", "expert", "expert"]))
