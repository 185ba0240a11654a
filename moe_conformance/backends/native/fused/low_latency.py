"""The low-latency layout: C places for each expert on its rank, of which the first few are filled, a run per source.

Pairs are sent by all-to-all; the receive buffer has the same shape in every step whose ranks have at most the
same number of tokens. The other places are neither written nor read.

T tokens of this rank, K slots, N experts held, C places, D hidden, W ranks of ep * etp, R rows received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange import misuse
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Sent
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.offered import offers
from moe_conformance.backends.native.router import capacity
from moe_conformance.contract import Claims, Config, Delivery, Places, Routing, Topology

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class TooManyTokens(ValueError):
    """Some rank of the group has more tokens than the stated maximum; every rank of the group raises it.

    Implements: EXCH-23.
    """


@dataclass(frozen=True)
class Filled:
    """Which places hold the rows of one dispatch, and the way back of the rows."""

    sent: Sent
    place_R: Tensor  # of every received row, by expert, then source
    shape: tuple[int, int]  # N, C
    begin_NW: Tensor


class LowLatencyExchange(AllToAllExchange):
    """Dispatch into fixed places and combine from them; weights are applied as in the all-to-all exchange."""

    @property
    def claims(self) -> Claims:
        """As of every exchange, and that the number of places is fixed."""
        return replace(super().claims, handed="static")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Deliver as many places as the rank with the largest load of the group could need."""
        rows_NCD, filled = self.fill(x, routing)
        return Delivery.batched(rows_NCD, filled.sent.plan.counts_N), filled

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Read the places that are filled, and send their rows back.

        Implements: EXCH-39.
        """
        rows_QD, places, shape = rows.reshape(-1, rows.shape[-1]), prod(handle.shape), handle.sent.permuted.shape
        if problem := misuse.of_expert_outputs(rows_QD, places, shape):
            super().combine(misuse.stand_in(rows, places, shape)[handle.place_R], handle.sent)
            raise ValueError(problem)
        return super().combine(rows_QD[handle.place_R], handle.sent)

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        """Return rows_NCD and where they are; C = W times `tokens_max`, or the largest T of the group.

        That is enough for tokens that name no expert twice; it is so many times more where one does. Where
        experts are padded to a capacity above that, C is W times the capacity.

        Raises:
            TooManyTokens: on all ranks, if any of them has more than `tokens_max`.

        Implements: DROP-13, EXCH-29.
        """
        self._check_input(x, routing)
        C = self._places(routing.ids_TK, tokens_max)
        delivery, sent = super().dispatch(x, routing)
        runs_NW, counts_N = sent.plan.runs_NW, sent.plan.counts_N
        begin_NW = self._begins(runs_NW)
        first_NW = begin_NW + C * torch.arange(len(counts_N), device=begin_NW.device).unsqueeze(1)
        place_R = _ranges(first_NW.flatten(), runs_NW.flatten())
        rows_RD = delivery.rows_RD
        places = rows_RD.new_empty(len(counts_N) * C, rows_RD.shape[1]).index_put((place_R,), rows_RD)
        filled = Filled(sent, place_R, (len(counts_N), C), begin_NW)
        return places.reshape(len(counts_N), C, rows_RD.shape[1]), filled

    def withdraw(self, device: torch.device) -> None:
        """Take part in the all-reduce (MAX) of T first, as the others call it."""
        self._largest(torch.empty(0, 0, dtype=torch.int64, device=device))
        super().withdraw(device)

    def _begins(self, runs_NW: Tensor) -> Tensor:
        """Return where every source's run begins among the places of an expert."""
        return runs_NW.cumsum(1) - runs_NW

    def _places(self, ids_TK: Tensor, tokens_max: int | None) -> int:
        group = self.topology.group("ep_etp")
        most, times = self._largest(ids_TK)
        if tokens_max is not None and most > tokens_max:
            raise TooManyTokens(
                f"a rank of the exchange group has {most} tokens, more than tokens_max = {tokens_max}; this rank has "
                f"{len(ids_TK)}"
            )
        tokens = most if tokens_max is None else tokens_max
        return group.size() * max(tokens * times, self._filled_up(tokens))

    def _filled_up(self, tokens: int) -> int:
        """Return to how many rows a rank of so many tokens pads an expert."""
        if not self.config.capacity.padded:
            return 0
        factor = self.config.capacity.factor
        return self.config.capacity.minimum if factor is None else capacity.of_rank(self.config, tokens)

    def _largest(self, ids_TK: Tensor) -> tuple[int, int]:
        """Return the largest T of the group, and how often one of its tokens names an expert."""
        same_TKK = (ids_TK.unsqueeze(1) == ids_TK.unsqueeze(2)) & (ids_TK >= 0).unsqueeze(1)
        times = int(same_TKK.sum(2).max()) if ids_TK.numel() else 0
        largest = torch.tensor([len(ids_TK), max(times, 1)], device=ids_TK.device)
        if self.topology.group("ep_etp").size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.topology.group("ep_etp"))
        most, times = largest.tolist()
        return most, times


def _ranges(first_B: Tensor, length_B: Tensor) -> Tensor:
    """Return first_b, first_b + 1, ... of every block b, so many as its length says, one after the other."""
    total = int(length_B.sum())
    before_B = length_B.cumsum(0) - length_B
    return torch.arange(total, device=first_B.device) + (first_B - before_B).repeat_interleave(length_B)


class FixedPlaces:
    """The same for callers that have no experts here; see `contract.PlacesExchange`."""

    def __init__(self, config: Config, topology: Topology, exchange_class: type[LowLatencyExchange]) -> None:
        """Build the exchange.

        Raises:
            CannotBuild: the experts do not divide over ep; weights, which come with combine, are to be applied before
                it; or experts are to be filled up, where places are as many as they are anyway.
        """
        if config.weights_applied == "input" or config.capacity.padded:
            raise CannotBuild("fixed places: weights_applied = 'input' and capacity.padded are not supported")
        self.exchange = exchange_class(config, topology)
        self.experts = config.experts

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts."""
        return self.exchange.local_experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built."""
        return self.exchange.resolved

    @property
    def claims(self) -> Claims:
        """Those of the exchange."""
        return self.exchange.claims

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, tokens_max: int) -> Places:
        """Fill W times `tokens_max` places of each expert; see `LowLatencyExchange.fill`."""
        unweighted = Routing(ids_TK, torch.ones(ids_TK.shape, device=x_TD.device), self.experts)
        rows_NCD, filled = self.exchange.fill(x_TD, unweighted, tokens_max)
        plan = filled.sent.plan
        return Places(rows_NCD, plan.counts_N, filled.begin_NW, plan.runs_NW, filled)

    def combine(self, rows_NCD: Tensor, weights_TK: Tensor, handle: Filled) -> Tensor:
        """Return y_TD, weighted."""
        permuted = handle.sent.permuted
        weighted = replace(permuted, weights_P=weights_TK[permuted.pairs.token_P, permuted.pairs.slot_P])
        return self.exchange.combine(rows_NCD, replace(handle, sent=replace(handle.sent, permuted=weighted)))


@offers("places_exchange")
def places_exchange(session: NativeSession, config: Config) -> FixedPlaces:
    """Build the exchange with fixed places, for callers."""
    return session.use(FixedPlaces)(config, session.topology, session.use(LowLatencyExchange))
