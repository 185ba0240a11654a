"""MC-97: with etp the shards of an expert are counted against a share that each pair enters once.

Two ranks that hold halves of all experts (etp = 2), four tokens each, K = 2. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

try:
    from megatron.core.transformer.moe.moe_logging import MoEOverloadFactorTracker
except ImportError:  # the branch dev has it
    print("not there: this Megatron-Core has no tracker of overload factors")
    sys.exit(77)


class Writer:
    """Keeps what a TensorBoard writer is given."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Keep a value, rounded."""
        self.values[name.removeprefix("moe/")] = round(value, 3)


def run(rank: int, store: str, found: torch.Tensor) -> None:
    """Record one forward, in which both ranks receive the pairs of both, and report."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tracker, writer = MoEOverloadFactorTracker(), Writer()
    tracker.set_process_groups(tp_ep_group=dist.group.WORLD)
    tracker.record_fwd(1, torch.tensor(16.0), torch.tensor(8.0))  # received rows, T K of the rank: as MoELayer passes
    tracker.report(iteration=1, writer=writer)
    found[rank] = writer.values["max_overload_factor"]
    dist.barrier()


if __name__ == "__main__":
    found = torch.zeros(2).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), found), nprocs=2, start_method="fork")
    print(f"observed: with etp = 2 the factor under balance is {found.max():.2f}")
    print("expected: with etp = 2 the factor under balance is 1.00")
    sys.exit(int(found.max() > 1.01))
