"""The ranks that tokens go to, counted before anything is sent, and whether a group is within a transport domain.

T tokens, K slots, W ranks, E experts, D nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_conformance.backends.native.offered import Offered
from moe_conformance.contract import Destinations


class DispatchLayout(Offered):
    """Marks ranks and nodes in boolean tables, in which a token is once however many of its slots lead there.

    Implements: EXCH-26.
    """

    surface = "dispatch_layout"

    @property
    def resolved(self) -> Mapping[str, str]:
        """How it counts."""
        return {"dispatch layout": "boolean tables"}

    def __call__(self, ids_TK: Tensor, owner_E: Tensor, node_of_W: Tensor) -> Destinations:
        """Return which ranks every token goes to, and how many go to every rank, node and expert."""
        token_P, slot_P = (ids_TK >= 0).nonzero(as_tuple=True)
        expert_P = ids_TK[token_P, slot_P]
        rank_P = self._ranks(expert_P, owner_E)
        in_rank_TW = self._marked(len(ids_TK), len(node_of_W), token_P, rank_P)
        in_node_TD = self._marked(len(ids_TK), self._nodes(node_of_W), token_P, self._node(rank_P, node_of_W))
        per_expert_E = torch.bincount(expert_P, minlength=len(owner_E))
        return Destinations(in_rank_TW, in_rank_TW.sum(0), in_node_TD.sum(0), per_expert_E)

    def _ranks(self, expert_P: Tensor, owner_E: Tensor) -> Tensor:
        return owner_E[expert_P]

    def _nodes(self, node_of_W: Tensor) -> int:
        return int(node_of_W.max()) + 1

    def _node(self, rank_P: Tensor, node_of_W: Tensor) -> Tensor:
        return node_of_W[rank_P]

    def _marked(self, rows: int, columns: int, row_P: Tensor, column_P: Tensor) -> Tensor:
        """Return a table that is set at the given places."""
        table = torch.zeros(rows, columns, dtype=torch.bool, device=row_P.device)
        table[row_P, column_P] = True
        return table


class Transport(Offered):
    """Compares the domains of the members, and nothing else.

    Implements: GROUP-05.
    """

    surface = "transport"

    @property
    def resolved(self) -> Mapping[str, str]:
        """What decides."""
        return {"transport": "domains of the members"}

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        """Return whether all members have one domain; the number of devices of this process does not matter."""
        del visible_devices
        return len({domain_of[rank] for rank in members}) == 1
