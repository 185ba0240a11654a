"""Experts with the parameters of a new model: every rank draws those that it holds, from a random state of its own.

The state belongs to the coordinates of a rank in ep and etp, not to the rank: ranks that differ in these hold different
experts, or different shards of them, and ranks that agree are replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.activated_experts import ActivatedExperts
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import Config, Topology

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

_SPREAD, _SEED = 0.02, 4321  # standard deviation of weights, and what all states are seeded from


class InitialValues:
    """Draws the parameters of this rank's experts.

    Implements: EXPT-11.
    """

    def __init__(self, topology: Topology) -> None:
        """Keep where this rank stands."""
        self.topology = topology

    def seed(self) -> int:
        """Return what the state of this rank is seeded with: another number for each pair of coordinates."""
        ep, etp = (self.topology.ranks(name).index(self.topology.rank) for name in ("ep", "etp"))
        return _SEED + ep * self.topology.sizes["etp"] + etp

    @torch.no_grad()
    def fill(self, experts: Experts | ActivatedExperts) -> None:
        """Draw all weights, stacked by expert, one after the other, and set biases to zero."""
        generator = torch.Generator().manual_seed(self.seed())
        for parameter in experts.parameters():
            if parameter.dim() == 3:
                parameter.copy_(self.drawn(parameter.shape, generator))
            else:
                parameter.zero_()

    def drawn(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Draw one weight of all experts of this rank, (N, ...)."""
        return torch.randn(shape, generator=generator) * _SPREAD


@offers("initial_experts", maps=None)
def initial_experts(session: NativeSession, config: Config) -> Experts | ActivatedExperts:
    """Build experts with the parameters of a new model."""
    experts = session.experts(config)
    session.use(InitialValues)(session.topology).fill(experts)
    return experts
