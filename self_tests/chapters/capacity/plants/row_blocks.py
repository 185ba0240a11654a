"""DROP, EXCH: a buffer in which every expert's rows are filled up to blocks, and bugs in what it has room for.

T tokens, K slots, N experts held, D hidden, P pairs, B rows of the buffer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.token_padding import PaddedExchange
from moe_conformance.backends.native.fused import autograd
from moe_conformance.backends.native.fused.managers import Held, HybridEPManager
from moe_conformance.backends.native.row_ops.permutation import Pairs, sort_pairs
from moe_conformance.contract import Claims, Delivery
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted

BLOCK = 4


class SaysBlocks(PaddedExchange):
    """The padding around the exchange, which passes on that rows come in blocks."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, multiple=BLOCK)


class InBlocks(HybridEPManager):
    """Every expert's rows are filled up with zeros to whole blocks, and the budget is one of blocks: no bug."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        arrived = autograd.dispatch(self.exchange, x_TD, ids_TK, weights_TK)
        budget, demand = self._budget(*ids_TK.shape), self._demand(arrived.handle.counts_N)
        if not self.drops:
            self._check(demand, budget, x_TD.device)
        pairs = sort_pairs(arrived.handle.ids_RK, self.exchange.held)
        if self.drops:
            pairs = self._kept(pairs, budget)
        rows_PD, weights_P = self._rows(arrived, pairs)
        filled_N = self._filled(pairs.counts_E)
        begin_N = filled_N.cumsum(0) - filled_N
        before_N = pairs.counts_E.cumsum(0) - pairs.counts_E
        at_P = torch.arange(len(rows_PD)) + (begin_N - before_N).repeat_interleave(pairs.counts_E)
        B = max(budget, int(filled_N.sum()))
        rows_BD = rows_PD.new_zeros(B, rows_PD.shape[1]).index_put((at_P,), rows_PD)
        weights_B = None if weights_P is None else weights_P.new_zeros(B).index_put((at_P,), weights_P)
        delivery = Delivery.grouped(rows_BD, filled_N, weights_B)
        overflowed = self._overflowed(demand, budget) if self.drops else None
        return replace(delivery, overflowed=overflowed), (Held(arrived.handle, pairs), at_P)

    def combine(self, rows: Tensor, held: Any) -> Tensor:
        kept, at_P = held
        return super().combine(rows[at_P], kept)

    def _budget(self, tokens: int, slots: int) -> int:
        """Return B: what is configured, or the balanced load with as much as blocks can add to it."""
        added = 0 if self.row_budget is not None else self.exchange.held * (BLOCK - 1)
        return super()._budget(tokens, slots) + added

    def _demand(self, counts_N: Tensor) -> int:
        return int(self._filled(counts_N).sum())

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        """Return the pairs of as many blocks as the buffer holds: the last experts go short."""
        room, kept_N = budget, []
        for rows in pairs.counts_E.tolist():
            kept_N.append(min(rows, room // BLOCK * BLOCK))
            room -= -(-kept_N[-1] // BLOCK) * BLOCK
        expert_P = torch.arange(len(kept_N)).repeat_interleave(pairs.counts_E)
        rank_P = torch.arange(len(expert_P)) - (pairs.counts_E.cumsum(0) - pairs.counts_E)[expert_P]
        stays_P = rank_P < torch.tensor(kept_N)[expert_P]
        token_P, slot_P = pairs.token_P[stays_P], pairs.slot_P[stays_P]
        return replace(pairs, token_P=token_P, slot_P=slot_P, counts_E=torch.tensor(kept_N))

    def _filled(self, rows_N: Tensor) -> Tensor:
        return (rows_N + BLOCK - 1) // BLOCK * BLOCK


class Blocks(Native):
    """Native, with a buffer in blocks."""

    session_class = NativeSession.building(InBlocks, SaysBlocks)


_SAYS = (SaysBlocks,)


@planted(
    Expectation(
        *("DROP-14", "budget-exact-even", "dispatch"),
        *("reports no overflow in microbatch 0: rank", "in multiples of 4); the receive buffer has"),
    ),
    Expectation("DROP-14", "overfull-by-turns-even", "dispatch", "reports no overflow", "in multiples of 4)"),
    Expectation(
        "DROP-15", "overfull-by-turns-even", "dispatch", "; its receive buffer has", "in multiples of 4) in microbatch"
    ),
    also=_SAYS,
)
class RowsAgainstABudgetOfBlocks(InBlocks):
    """Rows are held against the budget before they are filled up to blocks, and the buffer grows by what is added."""

    def _demand(self, counts_N: Tensor) -> int:
        return int(counts_N.sum())

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        return HybridEPManager._kept(self, pairs, budget)


@planted(
    Expectation(
        "DROP-16", "overfull-by-turns-even", "dispatch", "is dropped although it fits the receive buffer: rank"
    ),
    also=_SAYS,
    layout=EP2_ETP2,
)
class OneBlockStaysEmpty(InBlocks):
    """The last block of a full buffer is never used."""

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        over = self._demand(pairs.counts_E) > budget
        return super()._kept(pairs, budget - BLOCK if over else budget)


@planted(
    Expectation(
        "EXCH-25", "budget-spare-even", "dispatch", "the receive buffer of rank 0 has", "padded to multiples of 4"
    ),
    also=_SAYS,
)
class BudgetWithoutBlocks(InBlocks):
    """The budget is that of the rows of a balanced load, and nothing is added for those that fill blocks."""

    def _budget(self, tokens: int, slots: int) -> int:
        return HybridEPManager._budget(self, tokens, slots)
