"""MC-92: a report of ranks with different numbers of entries waits, or ends a process.

Two ranks of ep, of one entry and of two. Exits 1 while the finding is there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

try:
    from megatron.core.transformer.moe.moe_logging import MoEOverloadFactorTracker
except ImportError:  # the branch dev has it
    print("not there: this Megatron-Core has no tracker of overload factors")
    sys.exit(77)


def run(rank: int, store: str, done: Any) -> None:
    """Report, and say that it has returned or raised an error of the library's own."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    tracker = MoEOverloadFactorTracker()
    tracker.set_process_groups(tp_ep_group=dist.group.WORLD)
    for _ in range(1 + rank):
        tracker.record_fwd(1, torch.tensor(8.0), torch.tensor(8.0))
    with contextlib.suppress(ValueError):  # what the tracker raises of entries that do not fit
        tracker.report(iteration=1)
    done.put(rank)


if __name__ == "__main__":
    done = multiprocessing.get_context("fork").SimpleQueue()
    ranks = mp.start_processes(run, (tempfile.mktemp(), done), nprocs=2, join=False, start_method="fork")
    for process in ranks.processes:
        process.join()
    ended = sum(not done.empty() and done.get() >= 0 for _ in range(2))
    print("observed: the report returns or is refused on", "every rank" if ended == 2 else "not every rank")
    print("expected: the report returns or is refused on every rank")
    sys.exit(int(ended < 2))
