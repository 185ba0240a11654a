"""MC-90: the cumulative overload factor divides by the balanced count of the rank's own tokens.

Two ranks of ep, of 12 and of 100 tokens, K = 2; both receive 112 pairs, as balance has it. Exits 1 while the finding is
there.
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
    """Record one forward with its backward, and report."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tracker, writer = MoEOverloadFactorTracker(), Writer()
    tracker.set_process_groups(tp_ep_group=dist.group.WORLD)
    received, own = torch.tensor(112.0), torch.tensor(2.0 * (12, 100)[rank])  # as MoELayer passes them
    tracker.record_fwd(1, received, own)
    tracker.record_bwd(received, own)
    tracker.report(iteration=1, writer=writer)
    found[rank] = torch.tensor([writer.values["max_overload_factor"], writer.values["max_cum_overload_factor"]])
    dist.barrier()


if __name__ == "__main__":
    found = torch.zeros(2, 2).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), found), nprocs=2, start_method="fork")
    largest, cumulative = found.amax(0).tolist()
    print(f"observed: under balance the largest factor is {largest:.2f}, the cumulative factor {cumulative:.2f}")
    print("expected: under balance the largest factor is 1.00, the cumulative factor 1.00")
    sys.exit(int(cumulative > 1.01))
