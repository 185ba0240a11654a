"""TF-03: expert gradients in float16 and float64 are divided twice when no replica shards them: torch's FSDP2.

transformers sets FSDP2's divide factor for experts to the number of batches and, where one rank alone holds them,
leaves the division to FSDP2. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
observed = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    layer = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(4.0)  # four batches
    layer(torch.ones(1, 1, dtype=dtype)).sum().backward()
    observed[str(dtype).removeprefix("torch.")] = layer.weight.grad.full_tensor().item()
print(f"observed: a gradient of 1, divided by 4, is {observed}")
print(f"expected: a gradient of 1, divided by 4, is {dict.fromkeys(observed, 0.25)}")
sys.exit(int(set(observed.values()) != {0.25}))
