"""MC-51: the kept bias of a layer is that of any other model's layer of the same number.

A second router, with another standard deviation, number of experts or dtype. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from megatron.core.transformer.moe import moe_utils

if not hasattr(moe_utils, "apply_biased_logits"):
    print("not there: this Megatron-Core has no biased forced routing")
    sys.exit(77)


class Tracker:
    """In the place of the tracker of CUDA's random states: draws from the state of the CPU."""

    def fork(self, name: str) -> torch.autograd.profiler.record_function:
        """Return a context that does nothing."""
        return torch.autograd.profiler.record_function(name)


def bias(deviation: float, experts: int, dtype: torch.dtype) -> str:
    """Return the deviation of the kept bias of layer 1, by the means of 64 random logits, and their dtype."""
    try:
        logits = moe_utils.apply_biased_logits(torch.zeros(64, experts, dtype=dtype), -deviation, layer_number=1)
    except RuntimeError as error:
        return str(error)
    return f"{logits.float().mean(0).std():.0e}, {logits.dtype}"


moe_utils.get_cuda_rng_tracker = Tracker
torch.manual_seed(0)
first = bias(1e6, 4096, torch.float32)
found = bias(10.0, 4096, torch.float32), bias(1e6, 4096, torch.bfloat16), bias(1e6, 8, torch.float32)
right = "1e+01, torch.float32", "1e+06, torch.bfloat16"
print(f"observed: after {first}: of deviation 10 {found[0]}; in bfloat16 {found[1]}; of 8 experts: {found[2]}")
print(f"expected: after {first}: of deviation 10 {right[0]}; in bfloat16 {right[1]}; of 8 experts: a bias")
sys.exit(int(found[:2] != right))
