"""MC-160: the z-loss is computed in the dtype of the logits. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.moe_utils import z_loss_func

logits_TE = (4 * torch.randn(24, 8, generator=torch.Generator().manual_seed(0))).bfloat16()
narrow, wide = (float(z_loss_func(logits, 1.0)) for logits in (logits_TE, logits_TE.float()))
print(f"observed: the z-loss of bfloat16 logits is {narrow:.4f}")
print(f"expected: the z-loss of bfloat16 logits is {wide:.4f}, as of the same logits in float32")
sys.exit(int(abs(narrow - wide) > 1e-3))
