"""TF-11: the root of an underflowed softplus has no gradient. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from transformers.activations import ACT2FN

logits = torch.tensor([[4.0, -200.0]], requires_grad=True)
activation = ACT2FN["sqrtsoftplus"]
activation(logits)[:, 0].sum().backward()
first, second = logits.grad[0].tolist()
print(f"observed: the gradient of the score of logit 4 is {first:.3f} to itself, {second} to a logit of -200")
print("expected: the gradient of the score of logit 4 is 0.245 to itself, 0.0 to a logit of -200")
sys.exit(int(second != 0.0))
