"""FP-04: forced load balance sorts by ids that were there before, and counts by none.

One dispatcher is given the ids of two batches of equal size. Exits 1 while the finding is there.
Needs: torchtitan.ops.scatter_add.deterministic_scatter_add_ of saforem2/torchtitan at commit 8d22a86d37c0.
"""

from __future__ import annotations

import sys

import torch
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

dispatcher = AllToAllTokenDispatcher.Config(num_experts=4, top_k=1, force_load_balance=True).build()
first, second = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[3], [3], [0], [0]])
dispatcher._force_load_balance_sort_indices(first)
sorted_ids = second.flatten()[dispatcher._force_load_balance_sort_indices(second)[0]].tolist()
sizes = dispatcher._force_load_balance_splits(4, 2, 0, torch.int64, torch.device("cpu"))[1]
print(f"observed: ids 3, 3, 0, 0 of a second batch are sorted as {sorted_ids}, and {sizes} rows go to the two ranks")
print("expected: ids 3, 3, 0, 0 of a second batch are sorted as [0, 0, 3, 3], and [2, 2] rows go to the two ranks")
sys.exit(int(sorted_ids != [0, 0, 3, 3]))
