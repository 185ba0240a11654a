"""MC-30: negative group sizes are accepted. Exits 1 while the finding is there."""

from __future__ import annotations

import sys
import tempfile

import torch.distributed as dist
from megatron.core import parallel_state

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
try:
    parallel_state.initialize_model_parallel(context_parallel_size=-1)
    observed = "accepted"
except (RuntimeError, ValueError, AssertionError):
    observed = "refused"
print(f"observed: context_parallel_size = -1 is {observed}")
print("expected: context_parallel_size = -1 is refused")
sys.exit(int(observed != "refused"))
