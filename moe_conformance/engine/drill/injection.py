"""Where a fault is injected: in which world, on which group and rank, and which ranks must be blamed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import RankContext
from ..records import Partition
from .faults import Fault, Role

NONMEMBER = "nonmember"  # returned by ranks outside of the group of the fault


@dataclass(frozen=True)
class Target:
    """What the ranks need to know of an injected fault; the payload of the job.

    Attributes:
        faulty: The rank with the fault.
        partner: The rank that the fault is directed at, if it needs two.
        group: The name of the group on which it happens; None is the world.
        other: The name of another group that contains the faulty rank; None is the world.
    """

    faulty: int
    partner: int
    group: str | None
    other: str | None

    def group_of(self, context: RankContext) -> dist.ProcessGroup | None:
        """Returns the group on which the fault happens; None on a rank outside of it."""
        return _named(self.group, context)

    def other_group_of(self, context: RankContext) -> dist.ProcessGroup | None:
        """Returns the other group; None on a rank outside of it."""
        return _named(self.other, context)


def _named(name: str | None, context: RankContext) -> dist.ProcessGroup | None:
    return dist.group.WORLD if name is None else context.groups.get(name)


def sum_over(group: dist.ProcessGroup | None = None, size: int = 3) -> float:
    """All-reduces (group rank + 1) over a group and returns the sum."""
    total = torch.full((size,), dist.get_rank(group) + 1.0)
    dist.all_reduce(total, group=group)
    return total[-1].item()


def groups(world: int) -> dict[str, Partition]:
    """Returns the groups of every job of the drill: all ranks but one in "most", two halves in "halves".

    In a world of 2 both are a group of both ranks, which is another group than the world.
    """
    if world == 2:
        return {"most": ((0, 1),), "halves": ((0, 1),)}
    half = world // 2  # worlds of the drill are even
    return {
        "most": (tuple(rank for rank in range(world) if rank != half),),
        "halves": (tuple(range(half)), tuple(range(half, world))),
    }


@dataclass(frozen=True)
class Injection:
    """One injection of a fault; `turn` selects the faulty rank."""

    fault: Fault
    world: int
    turn: int

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group on which the fault happens."""
        return tuple(range(self.world)) if self.fault.scope == "world" else groups(self.world)["most"][0]

    @property
    def target(self) -> Target:
        """The payload of the job."""
        members = self.members
        faulty, partner = (members[(self.turn + step) % len(members)] for step in (0, 1))
        here, elsewhere = (None, "halves") if self.fault.scope == "world" else ("most", None)
        return Target(faulty, partner, here, elsewhere)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that must be blamed."""
        target, pair = self.target, len(self.members) == 2
        match self.fault.blamed:
            case "nobody":
                return ()
            case "everyone":
                return self.members
            case "pair":
                return tuple(sorted((target.faulty, target.partner)))
            case "minority" if pair:
                return self.members
            case "faulty" | "minority":
                return (target.faulty,)

    def role(self, rank: int) -> Role:
        """Returns the role of a rank in this injection."""
        if rank not in self.members:
            return "nonmember"
        target = self.target
        return "faulty" if rank == target.faulty else "partner" if rank == target.partner else "peer"
