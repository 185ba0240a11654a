"""What the ranks of a drilled job are told: who is to misbehave, towards whom, and on which group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import RankContext

BYSTANDER = "bystander"  # what a rank returns that is not in the group of the fault


@dataclass(frozen=True)
class Plot:
    """One fault to be played.

    Attributes:
        faulty: The rank that misbehaves.
        partner: The rank that it does it to, where it takes two.
        group: The name of the group on which it happens; None is the world.
        other: The name of another group that has the faulty rank in it; None is the world.
    """

    faulty: int
    partner: int
    group: str | None
    other: str | None

    def place(self, context: RankContext) -> dist.ProcessGroup | None:
        """Returns the group of the fault; None on a rank that is not in it."""
        return _named(self.group, context)

    def elsewhere(self, context: RankContext) -> dist.ProcessGroup | None:
        """Returns the other group; None on a rank that is not in it."""
        return _named(self.other, context)


def _named(name: str | None, context: RankContext) -> dist.ProcessGroup | None:
    return dist.group.WORLD if name is None else context.groups.get(name)


def meet(group: dist.ProcessGroup | None = None, size: int = 3) -> float:
    """Adds up over a group; returns the sum of (group rank + 1)."""
    total = torch.full((size,), dist.get_rank(group) + 1.0)
    dist.all_reduce(total, group=group)
    return total[-1].item()
