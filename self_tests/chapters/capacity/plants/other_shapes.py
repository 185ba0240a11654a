"""DROP, EXCH: capacities and budgets that are right of tokens (T, D), one microbatch at a time, in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.exchange.token_padding import PaddedExchange
from moe_conformance.backends.native.fused.managers import Held, HybridEPManager
from moe_conformance.backends.native.router import capacity
from moe_conformance.backends.native.router.capacity import Blocks
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Delivery, Overflow, Routed, Routing
from self_tests.correct_backends.unusual import RoundedUpOverTensorRanks
from self_tests.planted_bugs.plant import EP2_ETP2, TP2_EP2, Expectation, planted

# ---- routers -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("DROP-01", "capacity-two-dims", "route", "rank 0"),
    Expectation("DROP-06", "capacity-two-dims-position", "route", "rank 0"),
)
class CapacityOfEachColumn(Router):
    """Of tokens (S, B, D) each of the B columns keeps its own first, up to a capacity of S tokens."""

    columns = 1

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        self.columns = x.shape[1] if x.dim() == 3 else 1
        return super().forward(x, padding_mask_T)

    def _capacity(self, tokens: int) -> int:
        return super()._capacity(tokens // self.columns)

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        kept_TK = torch.empty_like(ids_TK, dtype=torch.bool)
        for column in range(self.columns):
            own = slice(column, None, self.columns)
            kept_TK[own] = super()._keep(ids_TK[own], weights_TK[own], room)
        return kept_TK


@planted(Expectation("DROP-01", "capacity-tight", "route", "rank 0"), layout=TP2_EP2)
class CapacityOfTensorRanks(Router):
    """A capacity is of the tokens of all tensor ranks, and each of them fills it up with its own."""

    def _capacity(self, tokens: int) -> int:
        return super()._capacity(2 * tokens)


@planted(
    Expectation("DROP-01", "capacity-many-tokens-position", "route", "rank 0"),
    Expectation("DROP-06", "capacity-many-tokens-position", "route", "rank 0"),
)
class PositionsInBfloat16(Router):
    """Who comes before whom is counted in bfloat16, which cannot count beyond 256."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        if self.config.capacity.drop_policy == "weights":
            return super()._keep(ids_TK, weights_TK, room)
        chosen_TE = torch.zeros(len(ids_TK), self.config.experts).scatter(1, ids_TK, 1.0)
        place_TE = chosen_TE.cumsum(0).to(torch.bfloat16) - 1
        return (place_TE < room).gather(1, ids_TK)


# ---- filling up ----------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "DROP-08", "lossless-one-expert", "dispatch", "rows for expert", "by design claims capacity_over = 'tp'"
    ),
    layout=TP2_EP2,
)
class RoundedUpUnsaid(RoundedUpOverTensorRanks):
    """A capacity that drops nothing is rounded up to what divides over tp, and nothing says why."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, capacity_over=None)


@planted(
    Expectation("DROP-08", "lossless-one-expert", "run", "raised in forward:0: ValueError"),
    real="deepspeedai/DeepSpeed commit 5a2e705b8 (#5156)",
    layout=TP2_EP2,
)
class LosslessCutOverTp(AllToAllExchange):
    """A capacity that drops nothing is divided over tp, and a row that is left over has no place."""

    def _room(self, routing: Routing) -> int | None:
        room, ranks = super()._room(routing), self.topology.sizes["tp"]
        return None if room is None else room // ranks * ranks


@planted(Expectation("DROP-12", "to-capacity-two-dims-even", "run", "raised in forward:0: ValueError"))
class RoomOfTheLength(AllToAllExchange):
    """Experts are filled up to the capacity of the first dimension of x, which is T of tokens (T, D) alone."""

    length = 0

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        self.length = x.shape[0]
        return super().dispatch(x, routing)

    def _room(self, routing: Routing) -> int | None:
        if self.config.capacity.padded and self.config.capacity.factor is not None:
            return capacity.of_rank(self.config, self.length)
        return super()._room(routing)


@planted(Expectation("DROP-12", "to-capacity-halves-in-flight-uneven", "run", "combine:0"))
class BlocksOnTheExchange(AllToAllExchange):
    """Where the rows of experts that were filled up stand is kept on the exchange, for the next combine."""

    blocks: Blocks | None = None

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        rows_QD, permuted = super()._permute(x, routing, room)
        self.blocks = permuted.blocks
        return rows_QD, permuted

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        return super()._unpermute(rows_QD, replace(permuted, blocks=self.blocks))


@planted(Expectation("DROP-12", "to-capacity-inference-even", "combine", "rank 0"))
class FilledInTrainingAlone(AllToAllExchange):
    """Without gradients answers are looked up as if no expert had been filled up."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        if torch.is_grad_enabled() or permuted.blocks is None:
            return super()._unpermute(rows_QD, permuted)
        return super()._unpermute(rows_QD[: len(permuted.weights_P)], replace(permuted, blocks=None))


# ---- budgets -------------------------------------------------------------------------------------------------------


@planted(Expectation("DROP-14", "factor-exceeded-even", "dispatch", "which reports no overflow"), layout=EP2_ETP2)
class FactorUnchecked(HybridEPManager):
    """What does not fit into a buffer that was asked for as a factor is cut off, and nobody looks."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Held]:
        if self.row_budget is not None or self.drops:
            return super().dispatch(x_TD, ids_TK, weights_TK)
        self.drops = True
        try:
            delivery, held = super().dispatch(x_TD, ids_TK, weights_TK)
        finally:
            self.drops = False
        return replace(delivery, overflowed=None), held


@planted(
    Expectation(
        "DROP-14", "factor-overfull-even", "dispatch", "were not delivered to rank", "which reports no overflow"
    ),
    layout=EP2_ETP2,
)
class FactorDropsUnsaid(HybridEPManager):
    """What does not fit into a buffer that was asked for as a factor is dropped, and the flag is of rows alone."""

    def _overflowed(self, demand: int, budget: int) -> bool:
        return self.row_budget is not None and super()._overflowed(demand, budget)


class _OwnCount(PaddedExchange):
    """Tells the manager how many tokens this rank has without padding."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        self.inner.manager.own = len(routing.ids_TK)  # type: ignore[attr-defined]
        return super().dispatch(x, routing)


@planted(
    Expectation("EXCH-25", "budget-filled-uneven", "dispatch", "the receive buffer of rank"),
    layout=EP2_ETP2,
    also=(_OwnCount,),
)
class BudgetOfOwnTokens(HybridEPManager):
    """A factor is one of this rank's own tokens, and the group brings more."""

    own = 0

    def _budget(self, tokens: int, slots: int) -> int:
        return super()._budget(self.own or tokens, slots)

    def _check(self, demand: int, budget: int, device: torch.device) -> None:
        """All that comes has room, whatever was asked for."""

    def _size(self, budget: int, demand: int) -> int:
        return max(budget, demand)


@planted(Expectation("DROP-15", "budget-in-flight-even", "run", "backward:0"), layout=EP2_ETP2)
class RefusalLetsGo(HybridEPManager):
    """Who refuses lets go of everything, of the microbatches in flight too."""

    def __init__(self, config: Config, exchange: Any) -> None:
        super().__init__(config, exchange)
        self.flying: list[Held] = []

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Held]:
        try:
            delivery, held = super().dispatch(x_TD, ids_TK, weights_TK)
        except Overflow:
            for each in self.flying:
                each.pairs.token_P.zero_()
            raise
        self.flying.append(held)
        return delivery, held
