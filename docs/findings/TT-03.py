"""TT-03: an empty slot shifts rows to the wrong expert.

Three tokens: the first is routed to expert 2, the second to none, the third to expert 0. Exits 1 while the finding is
there.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

dispatcher = LocalTokenDispatcher.Config(num_experts=4, top_k=1).build()
x, ids = torch.arange(3.0).reshape(3, 1).expand(3, 8).contiguous(), torch.tensor([[2], [-1], [0]])
try:
    rows, counts, _ = dispatcher.dispatch(x, torch.ones(3, 1), ids, torch.tensor([1, 0, 1, 0]))
    observed = f"the row of expert 0 is token {int(rows[0, 0])}"
except (RuntimeError, ValueError, IndexError) as error:
    observed = f"refused: {error}"
print(f"observed: {observed}")
print("expected: the row of expert 0 is token 2, or the id -1 is refused")
sys.exit(int(observed == "the row of expert 0 is token 1"))
