"""Experts that answer with the very tensor that they were handed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Delivery, Session
from moe_conformance.contract.topology import Topology
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.scenarios.probe import recorded


class Identity:
    """Every expert is the identity. `rows` counts rows that were answered where they lay.

    Where answers are parts, that of one shard is all of it and those of the others are zeros: no other parts of a
    number with all its bits have a sum without rounding. The shards take turns by microbatch, which is set before every
    forward.
    """

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        """Nothing has been passed."""
        self.microbatch = 0
        self.rows = 0
        self._shard, self._shards = shard, shards
        self._handed: list[Handed] = []

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the rows themselves; a sum over slots or with weights is computed apart."""
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
        return (rows_RD * total_R1).to(rows_RD.dtype).reshape(delivery.shape)

    def handed(self, microbatch: int) -> tuple[Handed, ...]:
        """Everything delivered in a microbatch."""
        return tuple(handed for handed in self._handed if handed.microbatch == microbatch)


def identity_of(session: Session, topology: Topology) -> Identity:
    """Return this rank's, of as many shards as answers are cut into."""
    shards = topology.ranks("etp") if session.expert_output_is_partial else (topology.rank,)
    return Identity(shards.index(topology.rank), len(shards))
