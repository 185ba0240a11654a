"""MC-50: training fails after a first forward in inference mode. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from megatron.core.utils import GlobalMemoryBuffer

torch.cuda.current_device = lambda: "cpu"
buffer = GlobalMemoryBuffer()
with torch.inference_mode():
    buffer.get_tensor((4, 2), torch.float32, "mpu")
try:
    buffer.get_tensor((4, 2), torch.float32, "mpu").copy_(torch.ones(4, 2))
    observed = "works"
except RuntimeError as error:
    observed = f"raises: {str(error).splitlines()[0].split('.')[0]}"
print(f"observed: writing to the buffer in training, after inference mode, {observed}")
print("expected: writing to the buffer in training, after inference mode, works")
sys.exit(int(observed != "works"))
