"""DROP: bugs in an exchange that drops what its buffers cannot hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.fused.managers import Held, HybridEPManager
from moe_conformance.backends.native.fused.token_exchange import Arrived, TokenExchange
from moe_conformance.backends.native.row_ops.permutation import Pairs, first_of, sort_pairs
from moe_conformance.contract import Config
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted


def last_of(pairs: Pairs, number: int) -> Pairs:
    """Return that many pairs from the end, or all: the first experts go short."""
    expert_P = torch.arange(len(pairs.counts_E)).repeat_interleave(pairs.counts_E)
    begin = max(0, len(pairs.token_P) - number)
    counts_E = torch.bincount(expert_P[begin:], minlength=len(pairs.counts_E))
    return replace(pairs, token_P=pairs.token_P[begin:], slot_P=pairs.slot_P[begin:], counts_E=counts_E)


# ---- what is said ------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("DROP-14", "overfull-by-turns-even", "dispatch"),
        *("reports no overflow in microbatch 1 and drops", "rows: it would receive"),
    )
)
class TruncatesSilently(HybridEPManager):
    """What the buffer cannot hold is cut off, and nobody is told."""

    def _overflowed(self, demand: int, budget: int) -> bool:
        return False


@planted(
    Expectation(
        "DROP-14", "overfull-by-turns-even", "dispatch", "reports an overflow in microbatch 0 and drops nothing: it"
    )
)
class FlagOfAFullBuffer(HybridEPManager):
    """A buffer that is filled to its last row is flagged, though all rows found room."""

    def _overflowed(self, demand: int, budget: int) -> bool:
        return demand >= budget


@planted(
    Expectation(
        *("DROP-14", "overfull-by-turns-even", "dispatch"),
        "reports an overflow in microbatch 2 and drops nothing",
        "the flag of microbatch 1, which overflowed, was kept",
    )
)
class FlagOfEarlierCalls(HybridEPManager):
    """The flags of all calls are gathered in one, and nobody takes it down."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        super().__init__(config, exchange)
        self.over = False

    def _overflowed(self, demand: int, budget: int) -> bool:
        self.over |= super()._overflowed(demand, budget)
        return self.over


# ---- which slots -------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("DROP-15", "overfull-by-turns-even", "dispatch"),
        *("of microbatch 1 was delivered to rank", "although these hold shards of one expert"),
    ),
    layout=EP2_ETP2,
)
class ShardsDropOtherSlots(HybridEPManager):
    """Every other shard of an expert fills its buffer from the end, so that both miss other slots."""

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        of_others = self.exchange.group.rank() % self.exchange.shards
        return last_of(pairs, budget) if of_others else first_of(pairs, budget)


@planted(
    Expectation(
        *("DROP-15", "overfull-by-turns-even", "dispatch"),
        *("of microbatch 2 is dropped, but the receive buffer of rank", "is not exceeded: it would receive"),
    )
)
class DropsAgain(HybridEPManager):
    """As many rows as one call had no room for are left out of the next one too."""

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        super().__init__(config, exchange)
        self.short = 0

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        short, self.short = self.short, max(0, len(pairs.token_P) - budget)
        return super()._kept(pairs, min(budget, len(pairs.token_P) - short))


@planted(
    Expectation(
        *("DROP-15", "overfull-one-row-uneven", "dispatch"),
        *("of microbatch 1 is dropped, but the receive buffer of rank", "is not exceeded: it would receive"),
    )
)
class AllDropForTheBusiest(HybridEPManager):
    """Every rank drops as many rows as the busiest has too many, whether it has room for them or not."""

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        most = collectives.largest(len(pairs.token_P), self.exchange.group, torch.device("cpu"))
        return super()._kept(pairs, len(pairs.token_P) - max(0, most - budget))


@planted(
    Expectation(
        "DROP-16",
        "overfull-by-turns-even",
        "dispatch",
        "of microbatch 1 is dropped although it fits the receive buffer: rank",
    )
)
class ExpertsDropAll(HybridEPManager):
    """An expert of which not all rows find room gets none."""

    def _kept(self, pairs: Pairs, budget: int) -> Pairs:
        until_E = pairs.counts_E.cumsum(0)
        whole = until_E[until_E <= budget].tolist()
        return super()._kept(pairs, max(whole, default=0))


# ---- what the others yield ---------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("DROP-15", "overfull-by-turns-even", "gradient"),
        *("the gradient of the routing weight of rank", "instead of 0; the slot was dropped"),
    )
)
class OthersDroppedInBackward(HybridEPManager):
    """The backward looks for the rows that found room anew, and from the other end."""

    def _rows(self, arrived: Arrived, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        others = last_of(sort_pairs(arrived.handle.ids_RK, self.exchange.held), len(pairs.token_P))
        rows_PD, weights_P = super()._rows(arrived, pairs)
        rows_of_others_PD, weights_of_others_P = super()._rows(arrived, others)
        assert weights_P is not None
        assert weights_of_others_P is not None
        rows_PD = rows_PD.detach() + (rows_of_others_PD - rows_of_others_PD.detach())
        return rows_PD, weights_P.detach() + (weights_of_others_P - weights_of_others_P.detach())


class _Taken(HybridEPManager):
    """Native's manager, for plants in what comes back of rows that lost a slot."""

    def _lost(self, held: Held) -> Tensor:
        assert held.pairs is not None
        kept_RK = torch.zeros_like(held.handle.ids_RK, dtype=torch.bool)
        kept_RK[held.pairs.token_P, held.pairs.slot_P] = True
        return (held.handle.ids_RK >= 0) & ~kept_RK


@planted(
    Expectation(
        *("DROP-15", "overfull-filled-uneven", "combine"),
        *("y is not finite at rank", "of which slot", "was dropped at a full receive buffer"),
    )
)
class GarbageForTheDropped(_Taken):
    """The place of a dropped row in what is added up is memory that nobody wrote."""

    def _take_back(self, rows: Tensor, held: Any) -> Tensor:
        y_RD = super()._take_back(rows, held)
        garbage_RD = torch.full_like(y_RD, torch.nan)
        return torch.where(self._lost(held).any(1, keepdim=True), garbage_RD, y_RD)


@planted(Expectation("DROP-15", "overfull-of-none-even", "combine", "had all slots dropped; its output is"))
class DroppedTokensPassOn(_Taken):
    """A row of which no slot found room goes home as it came."""

    def _rows(self, arrived: Arrived, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        self.arrived_RD = arrived.rows_RD.detach()
        return super()._rows(arrived, pairs)

    def _take_back(self, rows: Tensor, held: Any) -> Tensor:
        y_RD = super()._take_back(rows, held)
        lost_R1 = (self._lost(held) == (held.handle.ids_RK >= 0)).all(1, keepdim=True)
        return torch.where(lost_R1, self.arrived_RD, y_RD)
