"""Exchanges: every (token, expert) pair is sent to the rank that holds the expert, its output back to the token's rank.

The delivered rows are expert-major; the rows of one expert are ordered by source rank, then token, then slot. The
weights are not sent: they are applied to the expert outputs in combine, or to the rows before they are sent where
`Config.weights_applied` is "input". With capacity.padded, rows of zeros follow those of each rank.

With etp > 1 every pair is sent to all etp shards of its expert, and their outputs, parts of a sum, are added.
All state of a step is in the handle: any number of steps may be in flight.

T tokens of this rank, K slots, E experts, N experts held, D hidden, P pairs of this rank, Q rows that it sends, R rows
received.

Implements: EXCH-10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives, misuse
from moe_conformance.backends.native.groups import CannotBuild, Placement
from moe_conformance.backends.native.router import capacity
from moe_conformance.backends.native.router.capacity import Blocks
from moe_conformance.backends.native.row_ops.permutation import Pairs, permute, sort_pairs, unpermute, weigh
from moe_conformance.backends.native.row_ops.reordering import expert_major
from moe_conformance.contract import Claims, Config, Delivery, Routing, Topology


@dataclass(frozen=True)
class Permuted:
    """What unpermute needs."""

    pairs: Pairs
    weights_P: Tensor
    shape: tuple[int, ...]  # of x
    blocks: Blocks | None = None  # padding to capacity

    @property
    def rows_E(self) -> Tensor:
        """Rows of every expert, padding included."""
        return self.pairs.counts_E if self.blocks is None else self.blocks.room_E


class LocalExchange:
    """One rank holds all experts whole: a permutation, no communication. The others build on its halves."""

    def __init__(self, config: Config, topology: Topology) -> None:
        """Take this rank's experts from the topology.

        Raises:
            CannotBuild: the experts do not divide over ep, or this variant cannot run on the layout.
        """
        self.config = config
        self.topology = topology
        self.placement = Placement.of(config.experts, topology)
        self.weighs_input = config.weights_applied == "input"
        self._check_layout()

    def _check_layout(self) -> None:
        ranks = len(self.topology.ranks("ep_etp"))
        if ranks > 1:
            raise CannotBuild(f"the local exchange sends nothing between the {ranks} ranks of ep * etp")

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts."""
        return self.placement.ids

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built and where it applies the weights."""
        return {"exchange": type(self).__name__, "weights": "input" if self.weighs_input else "combine"}

    @property
    def claims(self) -> Claims:
        """One row for each routed pair, weights where the session says; products and outputs are rounded, once each."""
        return Claims(combine_weights="float32", combine_sums="float32")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Return the rows of this rank's experts and the handle; x is (*lead, D) with prod(lead) == T."""
        self._check_input(x, routing)
        rows_QD, permuted = self._permute(x, routing, self._room(routing))
        return Delivery.grouped(rows_QD, permuted.rows_E), permuted

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return y in the shape of x and the dtype of the rows.

        Implements: EXCH-07.
        """
        return self._checked(self._unpermute, rows, handle, handle)

    def _check_input(self, x: Tensor, routing: Routing) -> None:
        """Raise if tokens or routing are wrong, on every rank of the group.

        Implements: EXCH-44.
        """
        problem = misuse.of_input(x, routing, self.config) or capacity.overfull(routing.ids_TK, self.config)
        if problem:
            self.withdraw(x.device)
            raise ValueError(problem)

    def _checked(
        self, combine: Callable[[Tensor, Any], Tensor], rows: Tensor, handle: Any, permuted: Permuted
    ) -> Tensor:
        """Return `combine` of the expert outputs; where their shape is wrong send NaN to the others, and raise.

        Implements: EXCH-45.
        """
        problem = misuse.of_expert_outputs(rows, delivered := self._delivered_rows(handle), permuted.shape)
        if not problem:
            return combine(rows, handle)
        combine(misuse.stand_in(rows, delivered, permuted.shape), handle)
        raise ValueError(problem)

    def _delivered_rows(self, handle: Any) -> int:
        """Return how many rows the dispatch of a handle delivered."""
        return int(handle.rows_E.sum())

    def withdraw(self, device: torch.device) -> None:
        """Take part in the collectives of a dispatch that this rank refuses: the others raise `DispatchRefused`."""

    def _room(self, routing: Routing) -> int | None:
        """Return to how many rows of this rank every expert is padded, None for no padding."""
        if not self.config.capacity.padded:
            return None
        if self.config.capacity.factor is not None:
            return capacity.of_rank(self.config, len(routing.ids_TK))
        ids_P = routing.ids_TK[routing.ids_TK >= 0]
        counts_E = torch.bincount(ids_P, minlength=routing.experts)
        return capacity.lossless(self.config, counts_E, self.topology.group("ep_etp"))

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        """Return one row per pair, by expert, padded to the capacity if asked for.

        With `weighs_input` they have been multiplied by their weights.

        Implements: EXPT-03.
        """
        pairs = sort_pairs(routing.ids_TK, routing.experts)
        weights_P = self._weights(routing, pairs)
        rows_PD = permute(x.reshape(-1, x.shape[-1]), pairs)
        if self.weighs_input:
            rows_PD = self._weigh(rows_PD, weights_P)
        blocks = None if room is None else Blocks.of(pairs.counts_E, room)
        return self._fill(rows_PD, blocks), Permuted(pairs, weights_P, tuple(x.shape), blocks)

    def _fill(self, rows_PD: Tensor, blocks: Blocks | None) -> Tensor:
        return rows_PD if blocks is None else blocks.fill(rows_PD)

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        """Return y from the expert outputs of the pairs, times their weights unless the rows were.

        Implements: EXCH-05.
        """
        rows_PD = rows_QD if permuted.blocks is None else permuted.blocks.take(rows_QD)
        if not self.weighs_input:
            rows_PD = self._weigh(rows_PD, permuted.weights_P)
        return unpermute(rows_PD, permuted.pairs).reshape(permuted.shape)

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        """Return the weight of every pair; that of an empty slot is in none and gets a gradient of zero.

        Implements: EXCH-03, GRAD-03.
        """
        return routing.weights_TK[pairs.token_P, pairs.slot_P]

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return weigh(rows_PD, weights_P)


@dataclass(frozen=True)
class Gathered:
    """How many tokens every rank of ep_etp has, and the permutation of all of them."""

    sizes_W: list[int]
    permuted: Permuted
    shape: tuple[int, ...]  # of x


class AllGatherExchange(LocalExchange):
    """Every rank gathers all tokens of its ep_etp group and computes its own experts; outputs are reduce-scattered."""

    def _check_layout(self) -> None:
        """Any layout will do."""

    @property
    def claims(self) -> Claims:
        """That all tokens are sent to all ranks, and that every rank rounds what it has added up."""
        return replace(super().claims, wire="all", combine_sums="rows")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Gather x, ids and weights, and permute what is this rank's; all ranks have the same K.

        Implements: EXCH-01.
        """
        self._check_input(x, routing)
        group = self.topology.group("ep_etp")
        x_TD = x.reshape(-1, x.shape[-1])
        sizes_W = self._sizes(x_TD.shape[0], x.device)
        ids_TK = collectives.all_gather(routing.ids_TK, sizes_W, group)
        everything = Routing(
            self._local_ids(ids_TK),
            collectives.all_gather(routing.weights_TK, sizes_W, group),
            self.placement.held,
        )
        room = self._rooms(ids_TK, sizes_W)
        rows_RD, permuted = self._permute(collectives.all_gather(x_TD, sizes_W, group), everything, room)
        return Delivery.grouped(rows_RD, permuted.rows_E), Gathered(sizes_W, permuted, tuple(x.shape))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Sum every token's expert outputs here, then over the ranks."""
        return self._checked(self._back, rows, handle, handle.permuted)

    def _delivered_rows(self, handle: Any) -> int:
        return int(handle.permuted.rows_E.sum())

    def _back(self, rows: Tensor, handle: Any) -> Tensor:
        everything = self._unpermute(rows, handle.permuted)
        local_rows = collectives.reduce_scatter(everything, handle.sizes_W, self.topology.group("ep_etp"))
        return local_rows.reshape(handle.shape)

    def withdraw(self, device: torch.device) -> None:
        """Send `REFUSED` instead of a number of tokens."""
        with suppress(collectives.DispatchRefused):
            self._sizes(collectives.REFUSED, device)

    def _sizes(self, tokens: int, device: torch.device) -> list[int]:
        """Return how many tokens every rank has."""
        group = self.topology.group("ep_etp")
        sizes_W = collectives.all_gather(torch.tensor([tokens], device=device), [1] * group.size(), group)
        collectives.check_not_refused(sizes_W)
        return sizes_W.tolist()

    def _rooms(self, ids_TK: Tensor, sizes_W: list[int]) -> int | None:
        """Return to how many rows of all ranks every expert is padded, given their ids, None for no padding."""
        if not self.config.capacity.padded:
            return None
        if self.config.capacity.factor is not None:
            return sum(capacity.of_rank(self.config, tokens) for tokens in sizes_W)
        largest = capacity.largest_load(ids_TK, self.config.experts, sizes_W)
        return max(self.config.capacity.minimum, largest) * len(sizes_W)

    def _local_ids(self, ids_TK: Tensor) -> Tensor:
        """Return the index among this rank's experts, -1 for an expert held elsewhere or an empty slot."""
        local_TK = ids_TK - self.placement.first
        mine_TK = (ids_TK >= 0) & (local_TK >= 0) & (local_TK < self.placement.held)
        return torch.where(mine_TK, local_TK, -1)


@dataclass(frozen=True)
class Plan:
    """The splits of one step; combine uses them in reverse."""

    sent_C: list[int]  # rows to every rank of ep
    received_C: list[int]  # rows from every rank of ep
    gathered_S: list[int]  # rows that every rank of etp has then
    order_R: Tensor  # from (etp rank, ep rank, expert) to (expert, source rank)
    counts_N: Tensor
    runs_NW: Tensor  # rows of each expert from each rank of ep_etp
    split: int = 0  # to which the rows to every rank are padded, where they are


@dataclass(frozen=True)
class Sent:
    """The splits, and the permutation of the pairs."""

    plan: Plan
    permuted: Permuted


@dataclass(frozen=True)
class Departed:
    """Pairs in flight; the rows must not be read or written before `arrive`."""

    rows: Tensor
    exchange: Any
    plan: Plan
    permuted: Permuted


class AllToAllExchange(LocalExchange):
    """Pairs are sent to their expert by all-to-all over ep, then to all its shards by all-gather over etp.

    Expert outputs are reduce-scattered over etp and sent back by all-to-all over ep.

    Implements: COST-03.
    """

    def _check_layout(self) -> None:
        """Any layout will do."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Send the pairs and group the received rows by expert.

        Implements: EXCH-01.
        """
        rows_QD, plan, permuted = self.planned(x, routing)
        return self.delivered(self._send(rows_QD, plan), plan, permuted)

    def planned(self, x: Tensor, routing: Routing) -> tuple[Tensor, Plan, Permuted]:
        """Return the rows to send, by expert and so by owner, and where they go."""
        self._check_input(x, routing)
        rows_QD, permuted = self._permute(x, routing, self._room(routing))
        return rows_QD, self._plan(permuted.rows_E), permuted

    def depart(self, x: Tensor, routing: Routing) -> Departed:
        """Send the pairs as `dispatch` does, without waiting for them."""
        rows_QD, plan, permuted = self.planned(x, routing)
        rows, exchange = collectives.depart(rows_QD, plan.sent_C, plan.received_C, self.topology.group("ep"))
        return Departed(rows, exchange, plan, permuted)

    def arrive(self, departed: Departed) -> tuple[Delivery, Any]:
        """Wait for the pairs and return what `dispatch` returns."""
        rows = collectives.arrive(departed.rows, departed.exchange)
        return self.delivered(rows, departed.plan, departed.permuted)

    def delivered(self, rows: Tensor, plan: Plan, permuted: Permuted) -> tuple[Delivery, Any]:
        """Gather the received rows over all shards, and group them by expert."""
        rows = collectives.all_gather(rows, plan.gathered_S, self.topology.group("etp"))
        return Delivery.grouped(self._regroup(rows, plan.order_R), plan.counts_N), Sent(plan, permuted)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Send the expert outputs back and sum them by token."""
        return self._checked(self._back, rows, handle, handle.permuted)

    def _delivered_rows(self, handle: Any) -> int:
        return len(handle.plan.order_R)

    def _back(self, rows: Tensor, handle: Any) -> Tensor:
        return self._unpermute(self._send_back(self.leaving(rows, handle.plan), handle.plan), handle.permuted)

    def leaving(self, rows: Tensor, plan: Plan) -> Tensor:
        """Return expert outputs as they are sent back: by rank of ep, and summed over the shards."""
        rows = self._ungroup(rows, plan.order_R)
        return collectives.reduce_scatter(rows, plan.gathered_S, self.topology.group("etp"))

    def summed(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        """Return y from the expert outputs that came back."""
        return self._unpermute(rows_QD, permuted)

    def _send(self, rows_QD: Tensor, plan: Plan) -> Tensor:
        return collectives.all_to_all(rows_QD, plan.sent_C, plan.received_C, self.topology.group("ep"))

    def _send_back(self, rows: Tensor, plan: Plan) -> Tensor:
        return collectives.all_to_all(rows, plan.received_C, plan.sent_C, self.topology.group("ep"))

    def _plan(self, counts_E: Tensor) -> Plan:
        """Exchange how many rows each rank sends for each expert.

        Implements: COST-06, EXCH-04, EXCH-12.
        """
        ep, etp = self.topology.group("ep"), self.topology.group("etp")
        C, S = ep.size(), etp.size()
        counts_CN = counts_E.reshape(C, self.placement.held)
        pending = self._start(counts_CN)
        sent_C = counts_CN.sum(1).tolist()  # while the counts are sent
        arriving_CN = pending.wait()
        arriving_SCN = collectives.all_gather(arriving_CN, [C] * S, etp).reshape(S, C, self.placement.held)
        collectives.check_not_refused(arriving_SCN.transpose(0, 1).reshape(C * S, -1))  # etp counts fastest in ep_etp
        return Plan(
            sent_C=sent_C,
            received_C=arriving_CN.sum(1).tolist(),
            gathered_S=arriving_SCN.sum((1, 2)).tolist(),
            order_R=expert_major(arriving_SCN),
            counts_N=arriving_SCN.sum((0, 1)),
            runs_NW=arriving_SCN.permute(2, 1, 0).reshape(self.placement.held, -1),
        )

    def withdraw(self, device: torch.device) -> None:
        """Send `REFUSED` instead of a number of pairs, over ep and etp to every rank of ep_etp."""
        E = self.topology.sizes["ep"] * self.placement.held
        if self.config.capacity.padded and self.config.capacity.factor is None:  # the others all-reduce (MAX) the load
            none_E = torch.zeros(E, dtype=torch.int64, device=device)
            capacity.lossless(self.config, none_E, self.topology.group("ep_etp"))
        with suppress(collectives.DispatchRefused):
            self._plan(torch.full((E,), collectives.REFUSED, device=device))

    def _start(self, counts_CN: Tensor) -> collectives.PendingAllToAll:
        return collectives.start_all_to_all(counts_CN, self.topology.group("ep"))

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        return rows_RD.index_select(0, order_R)

    def _ungroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        return rows_RD.index_select(0, order_R.argsort())
