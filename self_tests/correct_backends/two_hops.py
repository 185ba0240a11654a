"""An exchange in two hops: within the node to the rank that shares the place of the destination, then between nodes."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, Delivery, Routing, Topology
from self_tests.correct_backends.small_parts import SmallBackend, SmallSession, all_to_all, share, weighted_sum

PER_NODE = 2


@dataclass(frozen=True)
class Hop:
    """What one hop sent, for the way back."""

    order_S: Tensor
    received: list[int]
    sent: list[int]
    group: dist.ProcessGroup

    def back(self, rows_RD: Tensor) -> Tensor:
        """Return the rows in the order in which they were before the hop."""
        return all_to_all(rows_RD, self.sent, self.received, self.group)[self.order_S.argsort()]


def hop(rows_SD: Tensor, ids_S: Tensor, to_S: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Hop]:
    """Send rows, and the numbers of their experts, to ranks of a group; return what came."""
    order_S = to_S.argsort(stable=True)
    sent_W = to_S.bincount(minlength=group.size())
    received_W = torch.empty_like(sent_W)
    dist.all_to_all_single(received_W, sent_W, group=group)
    way = Hop(order_S, received_W.tolist(), sent_W.tolist(), group)
    ids_R = all_to_all(ids_S[order_S], way.received, way.sent, group)
    return all_to_all(rows_SD[order_S], way.received, way.sent, group), ids_R, way


class TwoHops:
    """Dispatch over the ranks of a node, then over the nodes; combine the other way round."""

    def __init__(self, config: Config, ep: dist.ProcessGroup, node: dist.ProcessGroup, rail: dist.ProcessGroup) -> None:
        self.node, self.rail, self.local_experts = node, rail, tuple(share(config.experts, ep))
        self.resolved = {"exchange": f"{rail.size()} nodes of {node.size()} ranks"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_P, N = routing.ids_TK.flatten(), len(self.local_experts)
        slots_S = (ids_P >= 0).nonzero().squeeze(1)
        rows, ids = x.reshape(-1, x.shape[-1])[slots_S // routing.ids_TK.shape[1]], ids_P[slots_S]
        rows, ids, first = hop(rows, ids, ids // N % self.node.size(), self.node)
        rows, ids, second = hop(rows, ids, ids // N // self.node.size(), self.rail)
        ids_R = ids - self.local_experts[0]
        handle = (x.shape, routing.weights_TK, slots_S, first, second)
        return Delivery.listed(rows, ids_R[:, None], None, ids_R.bincount(minlength=N)), handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shape, weights_TK, slots_S, first, second = handle
        return weighted_sum(first.back(second.back(rows)), slots_S, weights_TK).view(shape)


class TwoHopSession(SmallSession):
    """One topology on one rank, with process groups of its own."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        ranks, rank = topology.ranks("ep"), topology.rank
        size = PER_NODE if len(ranks) % PER_NODE == 0 else 1
        at = ranks.index(rank)
        of_node, of_rail = ranks[at // size * size :][:size], ranks[at % size :: size]
        self.node, self.rail = (
            dist.new_group(list(members), use_local_synchronization=True) for members in (of_node, of_rail)
        )

    def build_exchange(self, config: Config) -> TwoHops:
        return TwoHops(config, self.ep, self.node, self.rail)

    def close(self) -> None:
        for group in (self.node, self.rail):
            dist.destroy_process_group(group)


class TwoHop(SmallBackend):
    """What `--backend self_tests.correct_backends.two_hops:TwoHop` names."""

    name, session = "two-hops", TwoHopSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
