"""EXCH, GRAD and COST: bugs in the fused token exchange and in what its managers send and hand to the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.fused.low_latency import Filled, LowLatencyExchange
from moe_conformance.backends.native.fused.managers import DeepEPManager, Held, HybridEPManager, NCCLEPManager, Packed
from moe_conformance.backends.native.fused.token_exchange import Arrived, Handle, TokenExchange
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import EP2_ETP2, SINGLE, Expectation, planted

# ---- copies --------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-01", "even", "dispatch", "was delivered twice to expert"),
    Expectation("EXCH-05", "even", "dispatch", "every element of y is 2.000 x the expected value"),
    layout=EP2_ETP2,
)
class CopyPerSlot(DeepEPManager):
    """A token goes out once for each of its slots, and each copy names all of them."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        K = ids_TK.shape[1]
        return super().dispatch(*(each.repeat_interleave(K, dim=0) for each in (x_TD, ids_TK, weights_TK)))

    def combine(self, rows: Tensor, held: Any) -> Tensor:
        y = super().combine(rows, held)
        copies = held.handle.ids_RK.shape[1]
        return y.reshape(-1, copies, y.shape[1]).sum(1)


@planted(
    Expectation("COST-03", "even", "run", "dispatch:0 moves", "times the smallest number", "; allowed: "),
    Expectation("COST-04", "even", "run", "dispatch:0 moves", "combine:0 moves", "; needed: "),
    layout=EP2_ETP2,
)
class SlotBySlot(DeepEPManager):
    """Every slot travels by itself, also those that go to the same rank; the values are right."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        K = ids_TK.shape[1]
        delivery, held = super().dispatch(
            x_TD.repeat_interleave(K, dim=0), ids_TK.reshape(-1, 1), weights_TK.reshape(-1, 1)
        )
        return delivery, (held, K)

    def combine(self, rows: Tensor, held: Any) -> Tensor:
        y = super().combine(rows, held[0])
        return y.reshape(-1, held[1], y.shape[1]).sum(1)


@planted(
    Expectation("EXCH-10", "halves-in-flight-uneven", "run", "rank 0 raised in combine:0", "of another microbatch")
)
class LatestHandle(DeepEPManager):
    """The handle of the latest dispatch is kept on the manager, and combine takes that."""

    latest: Handle

    def _hand_over(self, arrived: Arrived) -> tuple[Delivery, Held]:
        self.latest = arrived.handle
        return super()._hand_over(arrived)

    def combine(self, rows: Tensor, held: Any) -> Tensor:
        return super().combine(rows, replace(held, handle=self.latest))


# ---- ids and weights -----------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-01", "even", "dispatch", "on rank 2", "was not delivered to expert 5 on rank 2"), layout=EP2_ETP2
)
class LocalIdsNotShifted(TokenExchange):
    """Global ids are held against the number of experts of a rank, and all ranks take the first ones for theirs."""

    def _local_ids(self, ids_RK: Tensor) -> Tensor:
        return torch.where(ids_RK < self.held, ids_RK, -1)


@planted(
    Expectation("EXCH-03", "even", "dispatch", "has the weight", "the weight of slot", "instead of"), layout=EP2_ETP2
)
class WeightsOfOthersSlots(TokenExchange):
    """A rank reads its weights from the first slots of a row, and some of those belong to other ranks."""

    def _own_slots(self, weights_RK: Tensor, handle: Handle) -> Tensor:
        own_RK = (handle.ids_RK >= 0).long()
        return super()._own_slots(weights_RK.gather(1, (own_RK.cumsum(1) - 1).clamp_min(0)), handle)


@planted(
    Expectation("GRAD-03", "even", "gradient", "every element of the gradients of the routing weights is zero"),
    layout=EP2_ETP2,
)
class WeightGradientsStayAway(TokenExchange):
    """Combine in the backward brings home the gradients of rows and not those of the weights beside them."""

    def combine(
        self, rows_RD: Tensor, handle: Handle, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y_TD, weights_TK = super().combine(rows_RD, handle, weights_RK)
        return y_TD, None if weights_TK is None else weights_TK * 0


# ---- handles -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-01", "in-flight-even", "dispatch", "microbatch 1 was dispatched by the routing of microbatch 0"),
    layout=EP2_ETP2,
)
class StaleLayout(TokenExchange):
    """The layout of an earlier routing is used for another that has as many tokens."""

    kept: Handle | None = None

    def _laid_out(self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None, known: Handle | None) -> Handle:
        if known is not None or self.kept is None or self.kept.tokens != len(x_TD):
            self.kept = super()._laid_out(x_TD, ids_TK, weights_TK, known)
        return self.kept


@planted(
    Expectation("COST-05", "even", "gradient", "backward:0 exchanges int64 again", "all_to_all_single"), layout=EP2_ETP2
)
class IdsSentAgain(TokenExchange):
    """A dispatch with a handle sends the ids of its slots once more."""

    def _laid_out(self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None, known: Handle | None) -> Handle:
        if known is not None:
            collectives.all_to_all(known.ids_RK, known.received_W, known.sent_W, self.group)
        return super()._laid_out(x_TD, ids_TK, weights_TK, known)


# ---- what the managers make of it ----------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-05", "even", "combine", "likely cause: it includes the expert output of a padding row (16384)"),
    layout=EP2_ETP2,
)
class AnswersFromTheTail(HybridEPManager):
    """The answers are read from the end of the static buffer, where nothing was put."""

    def _take_back(self, rows: Tensor, held: Held) -> Tensor:
        assert held.pairs is not None
        return super()._take_back(rows[len(rows) - len(held.pairs.token_P) :], held)


@planted(Expectation("EXCH-04", "even", "dispatch", "rank 0 reports", "rows for expert 0"), layout=EP2_ETP2)
class BudgetClaimed(HybridEPManager):
    """The whole static buffer is claimed for the last expert that has rows, unused rows included."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Held]:
        delivery, held = super().dispatch(x_TD, ids_TK, weights_TK)
        assert delivery.counts_N is not None
        counts_N = delivery.counts_N.clone()
        counts_N[0] += len(delivery.rows_RD) - int(counts_N.sum())
        return replace(delivery, counts_N=counts_N), held


@planted(
    Expectation(
        "EXCH-01", "even", "dispatch", "are exchanged", "was delivered to expert 7", "instead of expert 5 on rank 2"
    ),
    layout=EP2_ETP2,
)
class RunsReadOneTooFar(NCCLEPManager):
    """The table of the packed buffer holds where runs end, and is read as where they begin."""

    def _experts(self, held: Packed, rows: int) -> Tensor:
        assert held.begin_WN is not None
        ends = held.begin_WN.flatten().roll(-1)
        ends[-1] = rows
        return super()._experts(replace(held, begin_WN=ends.reshape(held.begin_WN.shape)), rows)


@planted(
    Expectation("EXCH-05", "even", "combine", "every answer of expert 5 (held by rank 0) in y is missing"),
    real="deepspeedai/DeepSpeed PR #8213, review",
    layout=SINGLE,
)
class NothingToCombineAlone(HybridEPManager):
    """Where all experts are here nothing has travelled, and combine is left out, the sum over slots with it."""

    def _take_back(self, rows: Tensor, held: Held) -> Tensor:
        return rows[: held.handle.rows] if self.exchange.group.size() == 1 else super()._take_back(rows, held)


# ---- static budgets ------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "EXCH-25", "budget-of-a-fraction-even", "dispatch", "has 229 rows instead of at least 230: 1.15 times", "is 230"
    ),
    layout=EP2_ETP2,
)
class BudgetRoundedDown(HybridEPManager):
    """The budget is cut off to a whole number."""

    def _budget(self, tokens: int, slots: int) -> int:
        return int(self.factor * tokens * slots * self.exchange.shards)


@planted(
    Expectation("EXCH-25", "budget-spare-even", "dispatch", "the receive buffer of rank 0 has 45 rows", "is 90"),
    layout=EP2_ETP2,
)
class BudgetWithoutShards(HybridEPManager):
    """The budget forgets that the tokens of all shards come to each of them."""

    def _budget(self, tokens: int, slots: int) -> int:
        return super()._budget(tokens, slots) // self.exchange.shards


@planted(
    Expectation("EXCH-22", "budget-roomy-even", "dispatch", "rows in microbatch 0 and", "in microbatch 1"),
    layout=EP2_ETP2,
)
class BufferOfTheLoad(HybridEPManager):
    """The buffer is made as large as the load, and its size changes with it."""

    def _size(self, budget: int, demand: int) -> int:
        return demand


class _StaleGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BD: Tensor, used: int) -> Tensor:
        ctx.used = used
        return rows_BD.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        stale_BD = torch.ones_like(gradients[0])
        stale_BD[: ctx.used] = gradients[0][: ctx.used]
        return stale_BD, None


@planted(Expectation("EXCH-22", "own-budget-roomy-uneven", "gradient", "the gradient of"), layout=EP2_ETP2)
class BufferTeachesTheLastExpert(HybridEPManager):
    """The last expert is handed what is left of the buffer; rows and gradients there are what others have left."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Held]:
        delivery, held = super().dispatch(x_TD, ids_TK, weights_TK)
        used, last = len(held.pairs.token_P), self.exchange.held - 1
        stale_B1 = (torch.arange(len(delivery.rows_RD)) >= used)[:, None]
        stale = {"rows_RD": torch.where(stale_B1, 1.0, delivery.rows_RD)}
        stale["ids_RJ"] = torch.where(stale_B1, last, delivery.ids_RJ)
        stale["weights_RJ"] = torch.where(stale_B1, 1.0, delivery.weights_RJ)
        return replace(delivery, **stale), held  # type: ignore[arg-type]

    def _take_back(self, rows: Tensor, held: Held) -> Tensor:
        return super()._take_back(_StaleGradients.apply(rows, len(held.pairs.token_P)), held)  # type: ignore[no-untyped-call]


@planted(
    Expectation("EXCH-22", "own-budget-roomy-uneven", "gradient", "(not finite)", "the gradient of gate of expert"),
    Expectation("EXCH-39", "own-budget-roomy-uneven", "gradient", "(not finite)", "the gradient of gate of expert"),
    layout=EP2_ETP2,
)
class BufferIsNotCleared(HybridEPManager):
    """The last expert is handed what is left of the buffer, which nobody has written; no gradient comes back to it."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Held]:
        delivery, held = super().dispatch(x_TD, ids_TK, weights_TK)
        left_B1 = (torch.arange(len(delivery.rows_RD)) >= len(held.pairs.token_P))[:, None]
        rows_RD = torch.where(left_B1, torch.empty_like(delivery.rows_RD), delivery.rows_RD)
        return replace(
            delivery, rows_RD=rows_RD, ids_RJ=torch.where(left_B1, self.exchange.held - 1, delivery.ids_RJ)
        ), held


@planted(Expectation("EXCH-01", "one-expert-in-all-slots-even", "dispatch", "counts [48, 0, 0, 0] for capacity 32"))
class TwoSlotsOfAToken(LowLatencyExchange):
    """Places are counted for tokens that name an expert twice, and no oftener."""

    def _largest(self, ids_TK: Tensor) -> tuple[int, int]:
        most, times = super()._largest(ids_TK)
        return most, min(times, 2)


@planted(Expectation("EXCH-09", "one-expert-in-all-slots-of-a-rank", "run", "raised in forward:0", "IndexError"))
class SlotsOfThisRank(LowLatencyExchange):
    """How often a token names an expert is counted on every rank by itself: places are too few for others' tokens."""

    def _largest(self, ids_TK: Tensor) -> tuple[int, int]:
        same_TKK = ids_TK.unsqueeze(1) == ids_TK.unsqueeze(2)
        return super()._largest(ids_TK)[0], int(same_TKK.sum(2).max()) if ids_TK.numel() else 1


@planted(
    Expectation("EXCH-10", "halves-in-flight-even", "dispatch", "microbatches 0 and 1 were in flight at the same time"),
    real="deepseek-ai/DeepEP issue #513",
)
class ClearsTheOtherBuffer(LowLatencyExchange):
    """There are two buffers, and each dispatch clears the one that the next will fill: it may still be in use."""

    other: Tensor | None = None

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        if self.other is not None:
            self.other.zero_()
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        self.other = rows_NCD.detach()
        return rows_NCD, filled


_RAISED = Expectation("EXCH-09", "even-float16", "run", "rank 0 raised in forward:0", "float16")


def _as_rows(weights_TK: Tensor, x_TD: Tensor) -> Tensor:
    """Return weights that were widened for bfloat16 alone."""
    return weights_TK.to(torch.float16) if x_TD.dtype == torch.float16 else weights_TK


@planted(_RAISED)
class DeepEPWidensBfloat16(DeepEPManager):
    """Weights are sent in float32 with rows of bfloat16, and with those of float16 in float16, which is refused."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, _as_rows(weights_TK, x_TD))


@planted(_RAISED)
class HybridEPWidensBfloat16(HybridEPManager):
    """As with the other managers."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, _as_rows(weights_TK, x_TD))


@planted(_RAISED)
class NCCLEPWidensBfloat16(NCCLEPManager):
    """As with the other managers."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, _as_rows(weights_TK, x_TD))
