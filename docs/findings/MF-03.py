"""MF-03: HybridEP keeps the group of its first dispatch for the process.

Layers of two groups, of one rank each, in turn. The kernel is a stand-in. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a

from moe_conformance.stand_ins.hybrid_ep import WideHybridEPBuffer
from moe_conformance.stand_ins.presenting import loaded_with, module

fused = loaded_with(fused_a2a, {"deep_ep": module("deep_ep", HybridEPBuffer=WideHybridEPBuffer)})
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(2)]
used = []
for group in groups:
    fused.hybrid_ep_dispatch(torch.ones(4, 8), torch.ones(4, 2).bool(), torch.ones(4, 2), group, 2)
    used.append(groups.index(fused._hybrid_ep_buffer.group))
print(f"observed: dispatches of the groups 0 and 1 are sent over the groups {used[0]} and {used[1]}")
print("expected: dispatches of the groups 0 and 1 are sent over the groups 0 and 1")
dist.destroy_process_group()
sys.exit(int(used != [0, 1]))
