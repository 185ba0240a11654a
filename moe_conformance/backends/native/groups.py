"""Rank lists of process groups, and the experts that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_conformance.contract import Topology
from moe_conformance.contract.topology import Layout, RankLists


class CannotBuild(ValueError):
    """Native refuses a configuration; the message names its values."""


def groups(sizes: Mapping[str, int]) -> dict[str, RankLists]:
    """Return the rank lists of every group for sizes world, tp, cp, pp, ep, etp; no process group is made.

    Implements: GROUP-01, GROUP-02, GROUP-04.
    """
    axes = {name: sizes.get(name, 1) for name in ("tp", "cp", "pp", "ep", "etp")}
    return Layout(sizes["world"], **axes).groups()


@dataclass(frozen=True)
class Placement:
    """The experts of one rank: a contiguous block of N, the block of its ep coordinate, each cut over etp.

    Implements: EXPT-04.
    """

    first: int  # global id
    held: int  # N
    shard: int  # etp coordinate
    shards: int  # etp

    @classmethod
    def of(cls, experts: int, topology: Topology) -> Placement:
        """Return where this rank stands among `experts` experts.

        Raises:
            CannotBuild: the experts do not divide over ep.

        Implements: GROUP-03.
        """
        ep, etp = topology.ranks("ep"), topology.ranks("etp")
        if experts < 1 or experts % len(ep):
            raise CannotBuild(f"{experts} experts do not divide over ep = {len(ep)} ranks")
        held = experts // len(ep)
        return cls(ep.index(topology.rank) * held, held, etp.index(topology.rank), len(etp))

    @property
    def ids(self) -> tuple[int, ...]:
        """Global ids, ascending."""
        return tuple(range(self.first, self.first + self.held))
