"""MC-93: a report repeats that before it if nothing was recorded since. Exits 1 while the finding is there."""

from __future__ import annotations

import sys

import torch

try:
    from megatron.core.transformer.moe.moe_logging import MoEOverloadFactorTracker
except ImportError:  # the branch dev has it
    print("not there: this Megatron-Core has no tracker of overload factors")
    sys.exit(77)

tracker = MoEOverloadFactorTracker()
tracker.record_fwd(1, torch.tensor(24.0), torch.tensor(8.0))
first, second = tracker.report(iteration=1), tracker.report(iteration=2)
print("observed: the second of two reports in a row says:", second.strip() or "nothing")
print("expected: the second of two reports in a row says: nothing")
sys.exit(int(second == first))
