"""The healthy job that runs after every fault: computes known sums on every group and reports process state."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import RankContext
from .injection import sum_over


@dataclass(frozen=True)
class ProbeResult:
    """What one rank returns from the healthy job.

    Attributes:
        ticket: The number of the job, so that a late answer is not taken for this one.
        sums: Per group and for the world, the sum of (group rank + 1).
        received: The value from every rank of the world: ten times its rank plus this rank.
        pid: The pid of this process.
        parent: The pid of the fork server.
        state: The state of the process that a fault might have changed.
    """

    ticket: int
    sums: dict[str, float]
    received: tuple[float, ...]
    pid: int
    parent: int
    state: tuple[object, ...]


def run(context: RankContext, ticket: int) -> ProbeResult:
    """Calls a collective on every group and returns the results, with the state of the process."""
    sums = {"world": sum_over(), **{name: sum_over(group) for name, group in context.groups.items()}}
    sent = torch.tensor([10.0 * context.rank + target for target in range(context.world)])
    received = torch.empty(context.world)
    dist.all_to_all_single(received, sent)
    return ProbeResult(ticket, sums, tuple(received.tolist()), os.getpid(), os.getppid(), _state())


def expected(ticket: int, rank: int, world: int, sizes: dict[str, int]) -> tuple[object, ...]:
    """Returns the ticket and the numbers that a rank must return; `sizes` are the sizes of its groups."""
    sums = {name: size * (size + 1) / 2 for name, size in {"world": world, **sizes}.items()}
    return ticket, sums, tuple(10.0 * source + rank for source in range(world))


def _state() -> tuple[object, ...]:
    return (
        tuple(sorted(os.environ.items())),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    )
