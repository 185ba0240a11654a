"""Expert layouts: which experts, and which part of them, lie on which rank of a pipeline stage.

Sources: MoE parallel folding (Liu et al. 2025); arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Which experts lie where in one pipeline stage: world = etp * ep * edp ranks, etp fastest, edp slowest.

    Attributes:
        world: ranks of the stage.
        ep: over how many ranks the experts are spread.
        etp: into how many parts each expert is cut.
        experts: E.
        by_ep: the expert ids of every ep coordinate; by default N = E / ep consecutive ones.
    """

    world: int
    ep: int
    etp: int
    experts: int
    by_ep: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        sizes = (self.world, self.ep, self.etp, self.experts)
        if min(sizes) < 1 or self.world % (self.ep * self.etp):
            raise ValueError(f"{self}: sizes are positive and ep * etp divides world")
        if self.by_ep is None and self.experts % self.ep:
            raise ValueError(f"{self}: ep does not divide the number of experts; say which ones go where")
        held = [e for ids in self.held() for e in ids]
        if len(self.held()) != self.ep or sorted(held) != list(range(self.experts)):
            raise ValueError(f"{self}: by_ep must name each expert at exactly one of the ep coordinates")

    def held(self) -> tuple[tuple[int, ...], ...]:
        """List the expert ids of every ep coordinate.

        >>> Layout(world=4, ep=2, etp=1, experts=6).held()
        ((0, 1, 2), (3, 4, 5))
        """
        if self.by_ep is not None:
            return self.by_ep
        N = self.experts // self.ep
        return tuple(tuple(range(i * N, (i + 1) * N)) for i in range(self.ep))


def coordinates(rank: int, layout: Layout) -> tuple[int, int, int]:
    """Find the (etp, ep, edp) address of a rank: rank = etp_i + etp * (ep_i + ep * edp_i).

    Raises:
        ValueError: a rank outside of the world.

    Decides: CKPT-01. Source: MoE parallel folding (Liu et al. 2025).

    >>> coordinates(23, Layout(world=30, ep=5, etp=2, experts=5))
    (1, 1, 2)
    """
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank {rank} is not one of {layout.world}")
    return rank % layout.etp, rank // layout.etp % layout.ep, rank // layout.etp // layout.ep
