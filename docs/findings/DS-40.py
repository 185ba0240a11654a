"""DS-40: a gate with more choices than experts, or with none, is built. Exits 1 while the finding is there."""

from __future__ import annotations

import os
import sys

os.environ["DS_BUILD_OPS"] = "0"
from deepspeed.moe.sharded_moe import TopKGate

built = []
for k in (5, 0):
    try:
        TopKGate(8, 4, k)
        built.append(k)
    except (AssertionError, ValueError):
        pass
print(f"observed: gates of 4 experts are built with k = {built}")
print("expected: gates of 4 experts are built with k = []")
sys.exit(int(bool(built)))
