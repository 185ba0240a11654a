"""MC-150: a report of overload factors calls six collectives, one of them twice over.

Two ranks (ep = 2), one forward. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

try:
    from megatron.core.transformer.moe import moe_logging
except ImportError:  # the branch dev has it
    moe_logging = None
if not hasattr(moe_logging, "MoEOverloadFactorTracker"):
    print("not there: this Megatron-Core has no tracker of overload factors")
    sys.exit(77)


def run(rank: int, store: str, found: torch.Tensor) -> None:
    """Record one forward, and report; gloo averages nothing, so that an average is called as a sum."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    reduce, calls = dist.all_reduce, list[str]()

    def counted(tensor: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None):
        calls.append(str(op))
        return reduce(tensor, dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, group=group)

    moe_logging.torch.distributed.all_reduce = counted
    tracker = moe_logging.MoEOverloadFactorTracker()
    tracker.set_process_groups(tp_ep_group=dist.group.WORLD, expt_dp_group=alone)
    tracker.record_fwd(1, torch.tensor(8.0), torch.tensor(8.0))
    tracker.report(iteration=1)
    found[rank] = len(calls)
    dist.barrier()


if __name__ == "__main__":
    found = torch.zeros(2, dtype=torch.int64).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), found), nprocs=2, start_method="fork")
    print(f"observed: without pipeline stages a report calls {int(found.max())} all-reduces")
    print("expected: without pipeline stages a report calls 4 all-reduces")
    sys.exit(int(found.max() > 4))
