"""Where a fault is played: on which ranks of a world, and who must be blamed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import RankContext
from ..records import Partition
from .faults import Fault, Role

NONMEMBER = "nonmember"  # what a rank returns that is not in the group of the fault


@dataclass(frozen=True)
class Target:
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


def sum_over(group: dist.ProcessGroup | None = None, size: int = 3) -> float:
    """Adds up over a group; returns the sum of (group rank + 1)."""
    total = torch.full((size,), dist.get_rank(group) + 1.0)
    dist.all_reduce(total, group=group)
    return total[-1].item()


def groups(world: int) -> dict[str, Partition]:
    """Returns the groups of every drilled job: all but one rank in "most", two halves in "halves".

    In a world of 2 both are one group of both ranks, which still is another than the world.
    """
    if world == 2:
        return {"most": ((0, 1),), "halves": ((0, 1),)}
    half = world // 2  # worlds are even
    return {
        "most": (tuple(rank for rank in range(world) if rank != half),),
        "halves": (tuple(range(half)), tuple(range(half, world))),
    }


@dataclass(frozen=True)
class Injection:
    """One playing of a fault; each `turn` has another faulty rank."""

    fault: Fault
    world: int
    turn: int

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks on which it happens."""
        return tuple(range(self.world)) if self.fault.scope == "world" else groups(self.world)["most"][0]

    @property
    def target(self) -> Target:
        """What the ranks are told."""
        members = self.members
        faulty, partner = (members[(self.turn + step) % len(members)] for step in (0, 1))
        here, elsewhere = (None, "halves") if self.fault.scope == "world" else ("most", None)
        return Target(faulty, partner, here, elsewhere)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that must be blamed, and no others."""
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
        """Returns what a rank does in it."""
        if rank not in self.members:
            return "nonmember"
        target = self.target
        return "faulty" if rank == target.faulty else "partner" if rank == target.partner else "peer"
