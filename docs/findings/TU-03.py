"""TU-03: encode and decode compute in float32 what is float64. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch
from tutel import moe

x_TD = torch.full((2, 4), 1.0 + 2.0**-40, dtype=torch.float64)
scores_TE = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
routed, _ = moe.top_k_routing(scores_TE, 1, capacity_factor=0)
rows_ECD = moe.fast_encode(x_TD, routed)
found = float(rows_ECD.max()) - 1.0
print(f"observed: of tokens of 1 + 2^-40 in float64 the experts receive rows of 1 + {found:.3g}, in {rows_ECD.dtype}")
print(f"expected: of tokens of 1 + 2^-40 in float64 the experts receive rows of 1 + {2**-40:.3g}, in torch.float64")
sys.exit(int(found == 0.0))
