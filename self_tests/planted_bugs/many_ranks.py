"""Bugs that show on many ranks only; virtual ranks find them. On 8 ranks each of these is as good as native."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import AllToAllExchange, Permuted
from moe_conformance.contract import Routing
from moe_conformance.topology import Layout
from self_tests.planted_bugs.plant import Expectation, collect, planted

EP64 = Layout(64, ep=64)
EP256 = Layout(256, ep=256)


@planted(
    Expectation("EXCH-01", "many-ranks-uneven", "dispatch", "expert 127 on rank 63 expected, went to", "155 more"),
    layout=EP64,
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
    Expectation("EXCH-01", "many-ranks-uneven", "dispatch", "are exchanged: the first went to expert", "on rank 230"),
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


PLANTS = collect(globals())
