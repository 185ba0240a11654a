"""Pieces of rows padded to one size before an all-to-all, and cut back after it.

W ranks, R rows in W pieces, P = W s rows of W equal splits of s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Plan
from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import Config, Topology

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class EqualSplits:
    """Pads pieces to the largest between any two ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Keep the group whose ranks have to agree."""
        self.group, self.device = group, device

    @property
    def resolved(self) -> Mapping[str, str]:
        """To what pieces are padded."""
        return {"equal splits": "padded to the largest piece of the group"}

    def size(self, pieces: Sequence[int]) -> int:
        """Return the rows of the largest piece that any rank of the group has; collective.

        Implements: FAST-04.
        """
        largest = torch.tensor(max(pieces, default=0), device=self.device)
        if self.group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the pieces with zeros behind each, (P, D).

        Implements: FAST-01, FAST-03.
        """
        split = rows_RD.split(list(pieces))
        return torch.cat([F.pad(piece_nD, (0, 0, 0, size - len(piece_nD))) for piece_nD in split])

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the first rows of every split, (R, D).

        Implements: FAST-02, FAST-03.
        """
        return torch.cat([rows_PD[w * size : w * size + n] for w, n in enumerate(pieces)])


class EqualSplitsExchange(AllToAllExchange):
    """The all-to-all exchange with as many rows from every rank of ep to every other; experts get no row of padding."""

    def __init__(self, config: Config, topology: Topology, splits: EqualSplits) -> None:
        """Take what pads."""
        super().__init__(config, topology)
        self.splits = splits

    @property
    def resolved(self) -> Mapping[str, str]:
        """As of every exchange, and to what pieces are padded."""
        return {**super().resolved, **self.splits.resolved}

    def _plan(self, counts_E: Tensor) -> Plan:
        """Find the size that serves there and back, once nobody has refused."""
        plan = super()._plan(counts_E)
        return replace(plan, split=self.splits.size(plan.sent_C))

    def _send(self, rows_QD: Tensor, plan: Plan) -> Tensor:
        """Pad by what is sent, and cut back by what is received.

        Implements: FAST-05.
        """
        return self._exchanged(rows_QD, plan.sent_C, plan.received_C, plan.split)

    def _send_back(self, rows: Tensor, plan: Plan) -> Tensor:
        """Change the roles of what is sent and what is received.

        Implements: FAST-02.
        """
        return self._exchanged(rows, plan.received_C, plan.sent_C, plan.split)

    def _exchanged(self, rows: Tensor, sent_C: Sequence[int], received_C: Sequence[int], size: int) -> Tensor:
        group = self.topology.group("ep")
        padded = self.splits.pad(rows, sent_C, size)
        received = collectives.all_to_all(padded, [size] * group.size(), [size] * group.size(), group)
        return self.splits.compact(received, received_C, size)


@offers("equal_splits")
def equal_splits(session: NativeSession, config: Config) -> EqualSplits:
    """Build what pads pieces for the ranks of ep."""
    return session.use(EqualSplits)(session.topology.group("ep"), session.device)
