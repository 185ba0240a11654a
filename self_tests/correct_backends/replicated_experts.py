"""Redundant experts (EPLB): every rank also holds a copy of an expert of the next one, which takes half of its tokens.

Each copy is a parameter of its own, with the gradient of the tokens that came to it; after the backward the gradients
of the copies of an expert are added up, as those of data parallel ranks are.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Claims, Config, Delivery, Routing, Topology
from self_tests.correct_backends.small_parts import (
    AdaptedExperts,
    SmallBackend,
    SmallSession,
    SwiGLU,
    all_to_all,
    gradients,
    share,
    weighted_sum,
)


def places(experts: int, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Return the experts of every rank: its share, and with several ranks a copy of the first expert of the next."""
    ranks, held = group.size(), len(share(experts, group))
    own = [tuple(range(rank * held, (rank + 1) * held)) for rank in range(ranks)]
    return [(*own[rank], own[(rank + 1) % ranks][0]) for rank in range(ranks)] if ranks > 1 else own


class BalancedExchange:
    """Sends a routed pair to one of the copies of its expert, in turn by the number of the token."""

    claims = Claims(placement="replicas")

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        self.group, of_rank = group, places(config.experts, group)
        self.local_experts = of_rank[group.rank()]
        copies: list[list[int]] = [[] for _ in range(config.experts)]
        for place, expert in enumerate(expert for held in of_rank for expert in held):
            copies[expert].append(place)
        self.copies_E = torch.tensor([len(each) for each in copies])
        self.place_EC = torch.tensor([(each * 2)[:2] for each in copies])
        self.resolved = {"exchange": f"{len(self.local_experts)} places on each of {group.size()} ranks"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_TK, W, N = routing.ids_TK, self.group.size(), len(self.local_experts)
        known_TK = ids_TK.clamp_min(0)
        place_TK = self.place_EC[known_TK, self.turns(ids_TK) % self.copies_E[known_TK]]
        place_P = torch.where(ids_TK < 0, -1, place_TK).flatten()
        slots_S = place_P.argsort(stable=True)[int((place_P < 0).sum()) :]
        sent_WN = place_P[slots_S].bincount(minlength=W * N).view(W, N)
        received_WN = torch.empty_like(sent_WN)
        dist.all_to_all_single(received_WN, sent_WN, group=self.group)
        sent, received = sent_WN.sum(1).tolist(), received_WN.sum(1).tolist()
        rows_RD = all_to_all(x.reshape(-1, x.shape[-1])[slots_S // ids_TK.shape[1]], received, sent, self.group)
        order_R = torch.arange(N).repeat(W).repeat_interleave(received_WN.flatten()).argsort(stable=True)
        handle = (x.shape, routing.weights_TK, slots_S, order_R, received, sent)
        return Delivery.grouped(rows_RD[order_R], received_WN.sum(0)), handle

    def turns(self, ids_TK: Tensor) -> Tensor:
        """Return which of the copies of its expert each slot takes, modulo their number."""
        return torch.arange(ids_TK.shape[0])[:, None].expand_as(ids_TK)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shape, weights_TK, slots_S, order_R, received, sent = handle
        out_SD = all_to_all(rows[order_R.argsort()], sent, received, self.group)
        return weighted_sum(out_SD, slots_S, weights_TK).view(shape)


class ReplicatedSession(SmallSession):
    """One topology on one rank."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.count = 0

    def build_exchange(self, config: Config) -> BalancedExchange:
        return BalancedExchange(config, self.ep)

    def build_experts(self, config: Config) -> AdaptedExperts:
        self.count = config.experts
        return AdaptedExperts(SwiGLU(places(config.experts, self.ep)[self.ep.rank()], config))

    def finish_experts(self, experts: SwiGLU) -> None:
        for gradient in gradients(experts):
            of_all = gradient.new_zeros(self.count, *gradient.shape[1:])
            of_all.index_add_(0, torch.tensor(experts.ids), gradient)
            for group in ("ep", "edp"):
                dist.all_reduce(of_all, group=self.topology.group(group))
            gradient.copy_(of_all[torch.tensor(experts.ids)])


class Replicated(SmallBackend):
    """What `--backend self_tests.correct_backends.replicated_experts:Replicated` names."""

    name, session = "replicated-experts", ReplicatedSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
