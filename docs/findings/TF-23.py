"""TF-23: the auxiliary loss mixes the layers of a model. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

# In each of two layers all 4 tokens go to one of 2 experts, in the other layer to the other.
first, second = torch.tensor([[9.0, -9.0]] * 4), torch.tensor([[-9.0, 9.0]] * 4)
each = [float(load_balancing_loss_func((layer,), 2, 1)) for layer in (first, second)]
both = float(load_balancing_loss_func((first, second), 2, 1))
print(f"observed: two layers with losses of {each[0]:.2f} and {each[1]:.2f} have together a loss of {both:.2f}")
print("expected: two layers with losses of 2.00 and 2.00 have together a loss of 4.00, or of 2.00 as their mean")
sys.exit(int(abs(both - 4) > 0.01 and abs(both - 2) > 0.01))
