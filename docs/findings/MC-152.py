"""MC-152: the flex dispatcher's manager takes a slot of weight zero for an empty one.

One token with the experts 0 and 2, of weights 0 and 1, and a capacity factor. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.token_dispatcher import _DeepepManager

manager = object.__new__(_DeepepManager)  # its constructor asks for DeepEP, which this does not need
manager.num_experts, manager.router_topk, manager.capacity_factor = 4, 2, 4.0
manager.setup_metadata(torch.tensor([[True, False, True, False]]), torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
found = sorted(manager.token_indices[0].tolist())
print(f"observed: a token of the experts 0 and 2 is sent to {found}, -1 for nobody")
print("expected: a token of the experts 0 and 2 is sent to [0, 2], -1 for nobody")
sys.exit(int(found != [0, 2]))
