"""TF-20: the output of an expert for a row depends on the number of rows: torch's matrix product on CPU.

Eager experts of transformers run this product once per expert. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch

torch.manual_seed(0)
x, w = torch.randn(24, 32), torch.randn(16, 32)
together = torch.nn.functional.linear(x, w)
differ = sum(not torch.equal(together[t], torch.nn.functional.linear(x[t : t + 1], w)[0]) for t in range(24))
print("observed:", "some rows differ" if differ else "no row differs", "between a product of 24 rows and of one")
print("expected: no row differs between a product of 24 rows and of one")
sys.exit(int(differ > 0))
