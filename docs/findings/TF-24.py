"""TF-24: a batch of padding alone has an auxiliary loss of NaN. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

torch.manual_seed(0)
logits = torch.randn(4, 2, requires_grad=True)
loss = load_balancing_loss_func((logits,), 2, 1, torch.zeros(1, 4))
loss.backward()
gradient = "finite" if logits.grad is not None and bool(logits.grad.isfinite().all()) else "not finite"
found = f"the loss {float(loss.detach())}; its gradient is {gradient}"
print("observed: a batch whose attention mask is 0 everywhere has", found)
print("expected: a batch whose attention mask is 0 everywhere has the loss 0.0; its gradient is finite")
sys.exit(int(float(loss.detach()) != 0))
