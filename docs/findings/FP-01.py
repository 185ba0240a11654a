"""FP-01: two storages over the same memory count as apart, and the layer's input is overwritten.

The output of a shared expert and x overlap, as slices of one NumPy array and by DLPack. Exits 1 while the finding is
there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.token_dispatcher import _scatter_add_forward_or_autograd

array = torch.zeros(4, 2).numpy()
memory = torch.zeros(4, 2)
pairs = {
    "NumPy": (torch.from_numpy(array[:3]), torch.from_numpy(array[1:])),
    "DLPack": (memory[:3], torch.from_dlpack(memory[1:])),
}
changed = []
for name, (x, out) in pairs.items():
    before = x.clone()
    with torch.no_grad():
        _scatter_add_forward_or_autograd(out, torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), x)
    if not torch.equal(before, x):
        changed.append(name)
print("observed: adding rows to an output that overlaps x changes x by way of", " and ".join(changed) or "nothing")
print("expected: adding rows to an output that overlaps x changes x by way of nothing")
sys.exit(int(bool(changed)))
