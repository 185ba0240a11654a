"""Bugs that show on many ranks only; virtual ranks find them. On 8 ranks each of these is as good as native."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.contract import Config, Routing, Topology
from moe_conformance.contract.topology import Layout
from moe_conformance.contract.topology import Topology as OfALayout
from self_tests.planted_bugs.plant import Expectation, planted

EP64 = Layout(64, ep=64)
EP256 = Layout(256, ep=256)
REPLICATED64 = Layout(64, ep=8)


@planted(
    Expectation("EXCH-01", "many-ranks-uneven", "dispatch", "instead of expert 127 on rank 63", "155 more"), layout=EP64
)
class DestinationsInAWord(AllToAllExchange):
    """The ranks that a token goes to are bits of one word of 32 bits, so that rank 32 is taken for rank 0."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        held = self.placement.held
        owner_TK, local_TK = routing.ids_TK // held, routing.ids_TK % held
        wrapped_TK = torch.where(routing.ids_TK >= 0, owner_TK % 32 * held + local_TK, -1)
        return super()._permute(x, replace(routing, ids_TK=wrapped_TK), room)


@planted(
    Expectation("EXCH-09", "many-ranks-uneven", "run", "rank 0 sends 1 row to rank 35, which expects 0; 389 more"),
    layout=EP64,
)
class NodesOfEight(AllToAllExchange):
    """On the way back, splits that were gathered node by node are taken for gathered by the rank within a node."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        received_C = torch.tensor(handle.plan.received_C)
        if len(received_C) % 8 == 0:
            received_C = received_C.reshape(-1, 8).T.reshape(-1)
        return super().combine(rows, replace(handle, plan=replace(handle.plan, received_C=received_C.tolist())))


@planted(
    Expectation(
        "EXCH-01", "many-ranks-uneven", "dispatch", "are exchanged: the first was delivered to expert", "on rank 230"
    ),
    layout=EP256,
)
class ExpertsInASignedByte(AllToAllExchange):
    """Pairs are sorted by the id of their expert in 8 bits, where the second half of 256 experts is negative."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        rows_PD, permuted = super()._permute(x, routing, room)
        pairs = permuted.pairs
        order_P = routing.ids_TK[pairs.token_P, pairs.slot_P].to(torch.int8).argsort(stable=True)
        moved = replace(pairs, token_P=pairs.token_P[order_P], slot_P=pairs.slot_P[order_P])
        return rows_PD[order_P], replace(permuted, pairs=moved, weights_P=permuted.weights_P[order_P])


@planted(
    Expectation("GROUP-06", "many-ranks-uneven", "dispatch", "was delivered to expert", "instead of expert"),
    layout=EP64,
)
class RanksInAlphabeticalOrder(AllToAllExchange):
    """The ranks of a group are sorted as words, so that rank 10 stands before rank 2 and owns its experts."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        held, ranks = self.placement.held, self.topology.ranks("ep")
        order = torch.tensor([ranks.index(rank) for rank in sorted(ranks, key=str)])
        owner_TK, local_TK = routing.ids_TK.clamp(min=0) // held, routing.ids_TK % held
        sorted_TK = torch.where(routing.ids_TK >= 0, order[owner_TK] * held + local_TK, -1)
        return super()._permute(x, replace(routing, ids_TK=sorted_TK), room)


@planted(
    Expectation(
        *("GROUP-06", "many-ranks-uneven", "dispatch", "row 0 delivered to rank 0 for expert 0 is rank 8 token"),
        "which is outside of that rank's exchange group (0, 1, 2 and 5 more)",
    ),
    layout=REPLICATED64,
)
class GroupsByTheirSize(AllToAllExchange):
    """Groups are found by their size: where experts have as many replicas as ep ranks, rows go to those replicas."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        assert isinstance(topology, OfALayout)
        found = {len(topology.ranks(name)): topology.group(name) for name in ("ep", "edp")}
        groups = {**topology.process_groups, "ep": found[len(topology.ranks("ep"))]}
        self.topology = replace(topology, process_groups=groups)


class _SumsOfSome(GradientFinisher):
    """The gradients of replicas are summed over some of the ranks of the world."""

    def _mine(self) -> list[int]:
        raise NotImplementedError

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        if replicas != ("edp",):
            return super()._summed(gradient, replicas)
        every = [torch.empty_like(gradient, dtype=torch.float32) for _ in self.topology.ranks("world")]
        dist.all_gather(every, gradient.float().contiguous(), group=self.topology.group("world"))
        return torch.stack([every[rank] for rank in self._mine()]).sum(0)


@planted(
    Expectation("GROUP-06", "own-many-ranks-uneven", "finish", "the gradient of gate of expert 0 on rank 0 is"),
    layout=REPLICATED64,
)
class ReplicasInAWord(_SumsOfSome):
    """The replicas of an expert are bits of one word of 32 bits, so that those of rank 32 and up are others' again."""

    def _mine(self) -> list[int]:
        return [rank % 32 for rank in self.topology.ranks("edp")]


@planted(
    Expectation(
        "GROUP-06", "own-many-ranks-uneven", "finish", "hold replicas of", "have finished gradients that differ"
    ),
    layout=REPLICATED64,
)
class ReplicasNodeByNode(_SumsOfSome):
    """Gradients are summed among the replicas within 32 ranks and never between those blocks."""

    def _mine(self) -> list[int]:
        return [rank for rank in self.topology.ranks("edp") if rank // 32 == self.topology.rank // 32]
