"""`torchrun -m pytest` with a process group that is made for each test and destroyed after it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from benchmarks.contenders.ranks import run_and_judge
from benchmarks.timeline import assigned

ASSIGNMENT = assigned()


@pytest.fixture(scope="session")
def store() -> Store:
    """The store that torchrun serves."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@pytest.fixture
def group(store: Store, number: int) -> Iterator[None]:
    """The default group of one test; keys of its own, since gloo would find the addresses of the group before."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=PrefixStore(f"case{number}", store), rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("number", range(ASSIGNMENT.count))
def test_case(number: int) -> None:
    """The step is the oracle's."""
    run_and_judge(ASSIGNMENT, number)
