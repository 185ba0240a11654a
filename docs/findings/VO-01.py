"""VO-01: the backward of the asynchronous all-to-all raises. Exits 1 while the finding is there."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The packages are entered without what they import first, models of one version of transformers.
ROOT = importlib.util.find_spec("veomni").submodule_search_locations[0]


def package(name: str) -> None:
    """Enter a package without its __init__."""
    sys.modules[name] = found = ModuleType(name)
    found.__path__ = [ROOT + name.removeprefix("veomni").replace(".", "/")]


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with what the backward of either form makes of a row for each rank."""
    for name in ("veomni", "veomni.distributed", "veomni.distributed.moe"):
        package(name)
    from veomni.distributed.moe.comm import all_to_all, all_to_all_async

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    said = []
    for exchange in (all_to_all, all_to_all_async):
        rows = torch.ones(2, 4, requires_grad=True)
        received = exchange(dist.group.WORLD, rows, [1, 1], [1, 1])
        if isinstance(received, tuple):
            received[1].wait()
            received = received[0]
        try:
            received.sum().backward()
            said.append("returns")
        except TypeError as error:
            said.append(f"raises: {error}")
    answers.put((rank, tuple(said)))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = dict(answers.get() for _ in range(2))[0]
    print(f"observed: the backward of all_to_all {found[0]}, of all_to_all_async {found[1]}")
    print("expected: the backward of all_to_all returns, of all_to_all_async returns")
    sys.exit(int(found != ("returns", "returns")))
