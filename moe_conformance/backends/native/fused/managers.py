"""What the experts receive from a fused token exchange: three layouts of the same rows, after three libraries.

The exchange sends a token to a rank once, however many of its slots are there. A manager arranges the rows as its
library does for the experts, and reduces the expert outputs to one row for each received row. It applies no weight in
combine: the weights are sent, in float32 at least, and the experts apply them, or the manager does before the experts
where the config asks for it and every row has one weight.

T tokens, K slots, N experts held, D hidden, W ranks, R rows received, P pairs: filled slots of the received rows, B
rows of a static budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.fused import autograd
from moe_conformance.backends.native.fused.token_exchange import Arrived, Handle, TokenExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.row_ops.permutation import Pairs, first_of, permute, sort_pairs, unpermute, weigh
from moe_conformance.contract import Config, Delivery, Overflow


@dataclass(frozen=True)
class Held:
    """What a manager keeps of one microbatch until its combine."""

    handle: Handle
    pairs: Pairs | None = None  # of the received rows and their ids; None where the rows are delivered as received


class Manager:
    """Dispatches, arranges rows and combines; it keeps no state, so that any number of steps may be in flight."""

    has_budget: ClassVar[bool] = False  # whether it has a receive buffer of fixed size
    needs_equal_tokens: ClassVar[bool] = False  # all ranks must dispatch as many: `token_padding.py` pads
    handed: ClassVar[Literal["routed", "static"]] = "routed"  # how many rows its experts receive, see `Claims`

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        """Take the token exchange to work over.

        Raises:
            CannotBuild: the manager cannot do what the config asks for.
        """
        self.exchange = exchange
        self.weighs_input = config.weights_applied == "input"

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        """Return what the experts receive and what `combine` needs; collective."""
        arrived = autograd.dispatch(self.exchange, x_TD, ids_TK, weights_TK)
        return self._hand_over(arrived)

    def combine(self, rows: Tensor, held: Any) -> Tensor:
        """Return y_TD from the expert outputs; collective."""
        return autograd.combine(self.exchange, self._take_back(rows, held), held.handle)

    def _hand_over(self, arrived: Arrived) -> tuple[Delivery, Held]:
        raise NotImplementedError

    def _take_back(self, rows: Tensor, held: Held) -> Tensor:
        raise NotImplementedError


class DeepEPManager(Manager):
    """Rows as received, each with K slots: an index among the experts of this rank or -1, and a weight."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        """See `Manager`; one row has several weights, so that none can be applied before the experts."""
        super().__init__(config, exchange)
        if self.weighs_input:
            raise CannotBuild(
                "weights_applied = 'input': a row has several weights, none can be applied before the experts"
            )

    def _hand_over(self, arrived: Arrived) -> tuple[Delivery, Held]:
        handle = arrived.handle
        delivery = Delivery.listed(arrived.rows_RD, handle.ids_RK, arrived.weights_RK, handle.counts_N)
        return delivery, Held(handle)

    def _take_back(self, rows: Tensor, held: Held) -> Tensor:
        return rows


class _OneRowPerPair(Manager):
    """The base of managers that give every filled slot a row of its own, in an order of theirs."""

    def _rows(self, arrived: Arrived, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        """Return rows_PD and their weights; no weights if they have been applied."""
        rows_PD = permute(arrived.rows_RD, pairs)
        assert arrived.weights_RK is not None
        weights_P = arrived.weights_RK[pairs.token_P, pairs.slot_P]
        return (weigh(rows_PD, weights_P), None) if self.weighs_input else (rows_PD, weights_P)

    def _take_back(self, rows: Tensor, held: Held) -> Tensor:
        """Return the sum of every received row's pairs."""
        assert held.pairs is not None
        return unpermute(rows[: len(held.pairs.token_P)], held.pairs)


class HybridEPManager(_OneRowPerPair):
    """Rows expert by expert in a buffer of B rows on every rank, whatever the load.

    More than B on one rank is an error of all; or, with `Config.receive_buffer.overflow` "drop", each rank drops the
    rows that its buffer has no room for, and reports it. Shards of an expert receive and keep the same rows in the same
    order.

    All ranks dispatch the same number of tokens, empty ones among them. B is that number times K times the shards of an
    expert times `Config.receive_buffer.factor`, rounded up, or `Config.receive_buffer.rows`. The factor's default, ep,
    holds any load.

    Implements: DROP-13, EXCH-22, EXCH-25.
    """

    has_budget = True
    handed = "static"
    needs_equal_tokens = True

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        """See `Manager`."""
        super().__init__(config, exchange)
        self.row_budget = config.receive_buffer.rows
        self.drops = config.receive_buffer.overflow == "drop"
        self.factor = float(exchange.blocks if config.receive_buffer.factor is None else config.receive_buffer.factor)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Held]:
        """Return rows_BD by expert, see `Manager.dispatch`.

        Raises:
            Overflow: on all ranks, if any of them got more than B rows and none are dropped.

        Implements: DROP-14.
        """
        T, K = ids_TK.shape
        arrived = autograd.dispatch(self.exchange, x_TD, ids_TK, weights_TK)
        budget, demand = self._budget(T, K), int(arrived.handle.counts_N.sum())
        if not self.drops:
            self._check(demand, budget, x_TD.device)
        pairs = sort_pairs(arrived.handle.ids_RK, self.exchange.held)
        if self.drops:
            pairs = self._kept(pairs, budget)
        rows_PD, weights_P = self._rows(arrived, pairs)
        unused = self._size(budget, len(rows_PD)) - len(rows_PD)
        weights_B = None if weights_P is None else F.pad(weights_P, (0, unused))
        delivery = Delivery.grouped(F.pad(rows_PD, (0, 0, 0, unused)), pairs.counts_E, weights_B)
        overflowed = self._overflowed(demand, budget) if self.drops else None
        return replace(delivery, overflowed=overflowed), Held(arrived.handle, pairs)

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        """Return the pairs that the buffer holds; the others have no output and no gradient.

        Implements: DROP-15, DROP-16.
        """
        return first_of(pairs, budget)

    def _overflowed(self, demand: int, budget: int) -> bool:
        return demand > budget

    def _budget(self, tokens: int, slots: int) -> int:
        if self.row_budget is not None:
            return self.row_budget
        return math.ceil(self.factor * tokens * slots * self.exchange.shards)

    def _said(self) -> str:
        return (
            f"receive_buffer.factor = {self.factor:g}"
            if self.row_budget is None
            else f"receive_buffer.rows = {self.row_budget}"
        )

    def _size(self, budget: int, demand: int) -> int:
        """Return B."""
        return budget

    def _check(self, demand: int, budget: int, device: torch.device) -> None:
        largest = collectives.largest(demand, self.exchange.group, device)  # the overflow flag, of all ranks
        if largest > budget:
            raise Overflow(
                f"a rank of the exchange group would receive {largest} rows; the receive buffer has {budget} "
                f"({self._said()}); this rank would receive {demand}"
            )


@dataclass(frozen=True)
class Packed(Held):
    """What the packed layout keeps: also where in the buffer the rows of a source for an expert begin."""

    begin_WN: Tensor | None = None


class NCCLEPManager(_OneRowPerPair):
    """Rows packed by source rank, then expert, in a buffer of exactly that size; a table says where each run begins."""

    def _hand_over(self, arrived: Arrived) -> tuple[Delivery, Held]:
        handle, W, N = arrived.handle, self.exchange.group.size(), self.exchange.held
        received_W = torch.tensor(handle.received_W, device=handle.ids_RK.device)
        source_R1 = torch.arange(W, device=received_W.device).repeat_interleave(received_W).unsqueeze(1)
        run_RK = torch.where(handle.ids_RK >= 0, source_R1 * N + handle.ids_RK, -1)
        pairs = sort_pairs(run_RK, W * N)
        rows_PD, weights_P = self._rows(arrived, pairs)
        begin_WN = (pairs.counts_E.cumsum(0) - pairs.counts_E).reshape(W, N)
        held = Packed(handle, pairs, begin_WN=begin_WN)
        weights_P1 = None if weights_P is None else weights_P.unsqueeze(1)
        return Delivery.listed(rows_PD, self._experts(held, len(rows_PD)), weights_P1, handle.counts_N), held

    def _experts(self, held: Packed, rows: int) -> Tensor:
        """Return ids_P1, read off the table: a row belongs to the last run that begins at or before it."""
        assert held.begin_WN is not None
        begin = held.begin_WN.flatten()
        run_P = torch.searchsorted(begin, torch.arange(rows, device=begin.device), right=True) - 1
        return (run_P % self.exchange.held).unsqueeze(1)
