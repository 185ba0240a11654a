"""PACK: bugs in what an exchange does with a common token count, whatever its padding answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange
from moe_conformance.backends.native.exchange.token_padding import PaddedExchange, Untrimmed
from moe_conformance.backends.native.fused.low_latency import LowLatencyExchange
from moe_conformance.contract import Claims, Delivery, Routing
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted


class _PadsItsOwnCount(PaddedExchange):
    def _pad(self, x_TD: Tensor, routing: Routing, missing: int) -> tuple[Tensor, Routing]:
        T, A = len(x_TD), self.padding.alignment
        return super()._pad(x_TD, routing, -(-T // A) * A - T)


@planted(
    Expectation(
        "PACK-01", "padded-uneven", "dispatch", "rank 1 dispatches 8 rows instead of 16 for 4 tokens in forward:0"
    ),
    Expectation("PACK-11", "bounded-uneven", "dispatch", "rank 1 dispatches 8 rows instead of"),
    layout=EP2_ETP2,
    also=(_PadsItsOwnCount,),
)
class PadsToItsOwnCount(AllGatherExchange):
    """What pads answers rightly, and the exchange around it rounds up its own count."""


@planted(
    Expectation("PACK-02", "padded-uneven", "dispatch", "claims alignment = 64 instead of the configured 8"),
    layout=EP2_ETP2,
)
class StatesAnotherAlignment(PaddedExchange):
    """The exchange states the alignment of a kernel, and what pads states another."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, alignment=64)


@planted(
    Expectation("PACK-03", "padded-uneven", "dispatch", "likely cause: padding tokens were routed"), layout=EP2_ETP2
)
class AddedRowsRoutedUncounted(PaddedExchange):
    """Added rows go to expert 0, and no counts are claimed that would show them."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Untrimmed]:
        delivery, handle = super().dispatch(x, routing)
        return replace(delivery, counts_N=None), handle

    def _pad(self, x_TD: Tensor, routing: Routing, missing: int) -> tuple[Tensor, Routing]:
        x_PD, padded = super()._pad(x_TD, routing, missing)
        return x_PD, Routing(F.pad(routing.ids_TK, (0, 0, 0, missing)), padded.weights_TK, routing.experts)


@planted(Expectation("PACK-12", "bound-broken", "combine", "accepts all tokens in step 4, and its y"), layout=EP2_ETP2)
class RefusalLeavesATrace(PaddedExchange):
    """What was refused is not forgotten, and the next output is cut at the other end."""

    refused = False

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Untrimmed]:
        try:
            return super().dispatch(x, routing)
        except ValueError:
            self.refused = True
            raise

    def _trim(self, y_PD: Tensor, handle: Untrimmed) -> Tensor:
        return y_PD[len(y_PD) - handle.tokens :] if self.refused else super()._trim(y_PD, handle)


@planted(
    Expectation("PACK-13", "uneven", "dispatch", "2 times instead of 1"),
    Expectation("PACK-11", "bounded-uneven", "dispatch", "2 times instead of 1"),
    layout=EP2_ETP2,
)
class AsksTwice(LowLatencyExchange):
    """The largest count is asked for the places, and by what might pad once more."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        collectives.largest(len(routing.ids_TK), self.topology.group("ep_etp"), x.device)
        return super().dispatch(x, routing)


@planted(
    Expectation("PACK-13", "uneven", "dispatch", "over group (0, 1, 2, 3) for a largest number"),
    Expectation("PACK-11", "bounded-uneven", "dispatch", "over group (0, 1, 2, 3) for a largest number"),
    layout=EP2_ETP2,
)
class GathersCounts(AllToAllExchange):
    """The counts of all ranks are gathered, and the largest is found here."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        group = self.topology.group("ep_etp")
        own = torch.tensor([len(routing.ids_TK)], device=x.device)
        dist.all_gather([torch.empty_like(own) for _ in range(group.size())], own, group=group)
        return super().dispatch(x, routing)


@planted(Expectation("PACK-13", "uneven", "dispatch", "for a largest number in forward:0"), layout=EP2_ETP2)
class AsksInFloat(AllToAllExchange):
    """The largest count is asked for as a floating number."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        most = torch.tensor([float(len(routing.ids_TK))], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.topology.group("ep_etp"))
        return super().dispatch(x, routing)


@planted(
    Expectation("PACK-13", "uneven", "dispatch", "for a largest number in forward:0, before the rows are sent"),
    layout=EP2_ETP2,
)
class AsksByASum(AllToAllExchange):
    """Each rank writes its count into a place of its own, and the places are summed."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        group = self.topology.group("ep_etp")
        counts_W = torch.zeros(group.size(), dtype=torch.int64, device=x.device)
        counts_W[group.rank()] = len(routing.ids_TK)
        dist.all_reduce(counts_W, group=group)
        return super().dispatch(x, routing)


@planted(Expectation("PACK-13", "uneven", "dispatch", "for a largest number in forward:0"), layout=EP2_ETP2)
class AsksBehindTheRows(AllToAllExchange):
    """The largest count is asked for when the rows have gone."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        dispatched = super().dispatch(x, routing)
        collectives.largest(len(routing.ids_TK), self.topology.group("ep_etp"), x.device)
        return dispatched


@planted(
    Expectation(
        "PACK-13", "uneven", "dispatch", "over group (0, 1, 2, 3) for a largest number", "before the rows are sent"
    ),
    layout=EP2_ETP2,
)
class AsksThroughOneRank(AllToAllExchange):
    """One rank is told all counts, and tells the largest."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        group = self.topology.group("ep_etp")
        most, first = torch.tensor([len(routing.ids_TK)], device=x.device), dist.get_global_rank(group, 0)
        dist.reduce(most, first, dist.ReduceOp.MAX, group=group)
        dist.broadcast(most, first, group=group)
        return super().dispatch(x, routing)


@planted(
    Expectation(
        "PACK-13", "uneven", "dispatch", "over group (0, 1, 2, 3) for a largest number", "before the rows are sent"
    ),
    Expectation("PACK-11", "bounded-uneven", "dispatch", "over group (0, 1, 2, 3) for a largest number"),
    layout=EP2_ETP2,
)
class GathersCountsTwice(AllGatherExchange):
    """Counts are gathered for the sizes of what travels, and again for the largest of them."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        group = self.topology.group("ep_etp")
        own = torch.tensor([len(routing.ids_TK)], device=x.device)
        for _ in range(2):
            dist.all_gather([torch.empty_like(own) for _ in range(group.size())], own, group=group)
        return super().dispatch(x, routing)


@planted(
    Expectation("PACK-13", "uneven", "dispatch", "rank 1 dispatches 9 rows instead of 16 for 4 tokens in forward:0"),
    layout=EP2_ETP2,
)
class AddsRowsUnasked(AllGatherExchange):
    """It says that it cannot do without padding, and adds as many rows to few tokens as to many."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, padding="group_max", alignment=8)

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        below = (0, 0, 0, 5)
        ids_PK, weights_PK = F.pad(routing.ids_TK, below, value=-1), F.pad(routing.weights_TK, below)
        padded = Routing(ids_PK, weights_PK, routing.experts)
        delivery, handle = super().dispatch(F.pad(x.reshape(-1, x.shape[-1]), below), padded)
        return delivery, Untrimmed(handle, len(routing.ids_TK), tuple(x.shape))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle.handle)[: handle.tokens].reshape(handle.shape)


@planted(
    Expectation(
        *("PACK-03", "uneven", "dispatch"), *("of zeros for expert 0", "likely cause: padding tokens were routed")
    ),
)
class AddedRowsWeighNothing(AllToAllExchange):
    """Tokens are filled up to a multiple of 8 that nobody asked for; every expert gets some of them, of weight 0."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        T, K = routing.ids_TK.shape
        below = (0, 0, 0, -T % 8)
        added_AK = torch.arange(-T % 8 * K).reshape(-1, K) % routing.experts
        ids_PK = torch.cat([routing.ids_TK, added_AK.to(routing.ids_TK)])
        padded = Routing(ids_PK, F.pad(routing.weights_TK, below), routing.experts)
        delivery, handle = super().dispatch(F.pad(x.reshape(-1, x.shape[-1]), below), padded)
        return delivery, Untrimmed(handle, T, tuple(x.shape))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle.handle)[: handle.tokens].reshape(handle.shape)
