"""Experts that return the same tensor that they receive."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Delivery, Session
from moe_conformance.contract.topology import Topology
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.scenarios.probe import recorded


class Identity:
    """Experts that are all the identity. `rows` counts the rows that were returned in place.

    If expert outputs are partial sums, one etp shard returns the rows and the others return zeros: a number that uses
    all bits of its dtype has no other parts whose sum is exact. The shards take turns by microbatch, which is set
    before every forward.
    """

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        """Create experts for one etp shard, before any delivery."""
        self.microbatch = 0
        self.rows = 0
        self._shard, self._shards = shard, shards
        self._handed: list[Handed] = []

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the rows themselves, or new rows if they are weighted or have several slots."""
        self._handed.append(recorded(delivery, self.microbatch))
        rows_RD, ids_RJ = delivery.rows_RD, delivery.ids_RJ
        answers = self.microbatch % self._shards == self._shard
        if answers and ids_RJ.shape[1] == 1 and delivery.weights_RJ is None and delivery.unrouted == "padding":
            self.rows += int((ids_RJ >= 0).sum())
            return rows_RD.view(delivery.shape)
        weights_RJ = delivery.weights_RJ
        if weights_RJ is None:
            weights_RJ = torch.ones_like(ids_RJ, dtype=rows_RD.dtype)
        total_R1 = torch.where(ids_RJ >= 0, weights_RJ, 0).sum(1, keepdim=True) * answers
        answered_RD = torch.where((ids_RJ >= 0).any(1, keepdim=True), rows_RD, 0)  # 0 * NaN would be NaN
        return (answered_RD * total_R1).to(rows_RD.dtype).reshape(delivery.shape)

    def handed(self, microbatch: int) -> tuple[Handed, ...]:
        """Return copies of all deliveries of a microbatch."""
        return tuple(handed for handed in self._handed if handed.microbatch == microbatch)


def identity_of(session: Session, topology: Topology) -> Identity:
    """Return the identity experts of this rank, for its etp shard if expert outputs are partial sums."""
    shards = topology.ranks("etp") if session.expert_output_is_partial else (topology.rank,)
    return Identity(shards.index(topology.rank), len(shards))
