"""TU-04: a capacity factor counts in whole numbers per slot, so that below 1 all may be dropped.

Exits 1 while the finding is there.
"""

from __future__ import annotations

import math
import sys

import torch
from tutel import moe

FACTORS, T, E, K = (0.5, 1.0, 1.5, 1.75), 8, 8, 2


def capacity(factor: float) -> int:
    """The places of an expert on a rank."""
    torch.manual_seed(0)
    routed, _ = moe.top_k_routing(torch.rand(T, E).softmax(1), K, capacity_factor=factor)
    return int(routed[4])


found, expected = [capacity(each) for each in FACTORS], [math.ceil(each * K * T / E) for each in FACTORS]
print(f"observed: for 8 tokens with 2 of 8 experts each and factors of {FACTORS} an expert has {found} places")
print(f"expected: for 8 tokens with 2 of 8 experts each and factors of {FACTORS} an expert has {expected} places")
sys.exit(int(found != expected))
