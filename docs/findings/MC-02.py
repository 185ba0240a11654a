"""MC-02: the all-gather dispatcher returns a gradient in a buffer that it reuses.

Two ranks gather one tensor and run its backward, then gather another one. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def run(rank: int, store: str, changed: torch.Tensor) -> None:
    """Write into the rank's place whether the gradient has changed after its backward."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    first, second = torch.ones(3, 4, requires_grad=True), torch.full((3, 4), 5.0, requires_grad=True)
    # As the dispatcher gathers tokens (token_dispatch); the backward of its combine gathers into the same buffer.
    gathered = gather_from_sequence_parallel_region(first, group=dist.group.WORLD, use_global_buffer=True)
    gathered.clone().sum().backward()
    before = first.grad.clone()
    gather_from_sequence_parallel_region(second, group=dist.group.WORLD, use_global_buffer=True)
    changed[rank] = not torch.equal(before, first.grad)
    dist.barrier()


if __name__ == "__main__":
    changed = torch.zeros(2, dtype=torch.bool).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), changed), nprocs=2, start_method="fork")
    print(f"observed: a later gather changes a gradient on {int(changed.sum())} of 2 ranks")
    print("expected: a later gather changes a gradient on 0 of 2 ranks")
    sys.exit(int(changed.any()))
