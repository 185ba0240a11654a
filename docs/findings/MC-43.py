"""MC-43: a batch of empty sequences raises. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.models.multimodal.context_parallel import get_packed_seq_params

try:
    packed = get_packed_seq_params(torch.empty(2, 0), 0, 0, 1, use_packed_sequence=True)
    observed = f"cumulative lengths {packed.cu_seqlens_q.tolist()}"
except RuntimeError as error:
    observed = f"RuntimeError: {error}"
print(f"observed: {observed}")
print("expected: cumulative lengths [0, 0, 0]")
sys.exit(int(observed != "cumulative lengths [0, 0, 0]"))
