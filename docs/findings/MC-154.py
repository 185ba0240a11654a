"""MC-154: a score of sqrtsoftplus that underflows has a gradient of NaN. Exits 1 while the finding is there.

Needs: megatron-core>=0.17
"""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

logits_TE = torch.tensor([[4.0, 3.0, -200.0]], requires_grad=True)
weights_TE, _ = topk_routing_with_score_function(logits_TE, 2, score_function="sqrtsoftplus")
weights_TE[0, 0].backward()
found = [f"{value:.4f}" for value in logits_TE.grad[0].tolist()]
print(f"observed: the gradients of the first weight to the logits 4, 3 and -200 are {', '.join(found)}")
print("expected: the gradients of the first weight to the logits 4, 3 and -200 are 0.0304, -0.0389, 0.0000")
sys.exit(int(found[2] not in ("0.0000", "-0.0000")))
