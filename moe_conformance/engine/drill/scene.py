"""Where a fault is played: on which ranks of a world, and who must be blamed."""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Partition
from .faults import Fault, Role
from .plot import Plot


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
class Scene:
    """One playing of a fault; each `turn` has another faulty rank."""

    fault: Fault
    world: int
    turn: int

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks on which it happens."""
        return tuple(range(self.world)) if self.fault.scope == "world" else groups(self.world)["most"][0]

    @property
    def plot(self) -> Plot:
        """What the ranks are told."""
        members = self.members
        faulty, partner = (members[(self.turn + step) % len(members)] for step in (0, 1))
        here, elsewhere = (None, "halves") if self.fault.scope == "world" else ("most", None)
        return Plot(faulty, partner, here, elsewhere)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that must be blamed, and no others."""
        plot, pair = self.plot, len(self.members) == 2
        match self.fault.blamed:
            case "nobody":
                return ()
            case "everyone":
                return self.members
            case "pair":
                return tuple(sorted((plot.faulty, plot.partner)))
            case "minority" if pair:
                return self.members
            case "faulty" | "minority":
                return (plot.faulty,)

    def role(self, rank: int) -> Role:
        """Returns what a rank does in it."""
        if rank not in self.members:
            return "bystander"
        plot = self.plot
        return "faulty" if rank == plot.faulty else "partner" if rank == plot.partner else "peer"
