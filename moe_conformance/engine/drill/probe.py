"""The good case that follows every fault: right numbers on every group, and a look at what could be left over."""

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
    """What one rank says in a good case.

    Attributes:
        ticket: That of the job, so that no answer passes for another's.
        sums: Per group and for the world, the sum of (group rank + 1).
        received: What came from each rank of the world: ten times its rank plus this one.
        pid: This process.
        parent: The process that forked it.
        state: What a fault might have changed in it.
    """

    ticket: int
    sums: dict[str, float]
    received: tuple[float, ...]
    pid: int
    parent: int
    state: tuple[object, ...]


def run(context: RankContext, ticket: int) -> ProbeResult:
    """Talks to everybody and returns what came of it."""
    sums = {"world": sum_over(), **{name: sum_over(group) for name, group in context.groups.items()}}
    sent = torch.tensor([10.0 * context.rank + target for target in range(context.world)])
    received = torch.empty(context.world)
    dist.all_to_all_single(received, sent)
    return ProbeResult(ticket, sums, tuple(received.tolist()), os.getpid(), os.getppid(), _state())


def expected(ticket: int, rank: int, world: int, sizes: dict[str, int]) -> tuple[object, ...]:
    """Returns what the rank must say of the numbers; `sizes` are those of its groups."""
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
