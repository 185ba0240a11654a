"""EXCH: bugs on the way back from the experts: too little, from the wrong expert, in another order, at empty slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange, Permuted
from moe_conformance.contract import Delivery, Routing
from self_tests.correct_backends.unusual import LendsUntilTheNext
from self_tests.planted_bugs.plant import EP2_ETP2, TP2_EP2, Expectation, planted

# ---- combine -------------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-05", "top-all-even", "combine", "y of rank 0 token 0 is", "the row of rank 1 token 0"))
class AnswersOfAnotherRank(AllToAllExchange):
    """The answers for two ranks go home to each other."""

    def _ungroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        return torch.cat(super()._ungroup(rows_RD, order_R).chunk(2)[::-1])


@planted(Expectation("EXCH-05", "even", "combine", "every element of y on rank 1 is zero"))
class CombineSkippedOnOneRank(AllToAllExchange):
    """Rank 1 adds up nothing of what comes home."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        y = super()._unpermute(rows_PD, permuted)
        return y * 0 if self.topology.rank == 1 else y


@planted(
    Expectation(
        "EXCH-05",
        "even",
        "combine",
        "the expert output of a padding row (16384); 2 more of the same kind. Also: y of rank 0 token 0",
    ),
    real="NVIDIA/TransformerEngine commit b7323b1ec (#2907)",
)
class PaddingTrimmedAtWrongEnd(AllToAllExchange):
    """Padding lies behind the rows and is taken off before the answers."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        counts_N = delivery.counts_N.clone()
        counts_N[-1] += 2
        padding_2D = delivery.rows_RD.new_zeros(2, x.shape[-1])
        return Delivery.grouped(torch.cat([delivery.rows_RD, padding_2D]), counts_N), handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows[2:], handle)


@planted(Expectation("EXCH-38", "inference-even", "combine", "y of rank 0 token 0"))
class ReturnsBeforeItIsThere(AllToAllExchange):
    """Without gradients the output is returned while it is under way, and waited for in the next dispatch."""

    late: tuple[Tensor, Tensor] | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.late is not None:
            empty, y = self.late
            empty.copy_(y)
            self.late = None
        return super().dispatch(x, routing)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return y
        self.late = torch.full_like(y, 0.125), y
        return self.late[0]


@planted(
    Expectation("EXCH-32", "to-capacity-in-flight", "combine", "output of microbatch 0 on rank 0 was overwritten"),
    Expectation("EXCH-32", "identity-in-flight-even", "combine", "output of microbatch 0 on rank 0 was overwritten"),
    Expectation("EXCH-32", "in-flight-uneven", "combine", "the output of microbatch 0 on rank 0 was overwritten"),
)
class LendsOneOutput(LendsUntilTheNext):
    """An output is valid until the next forward, whether its backward has ended or not."""


@planted(
    Expectation("EXCH-32", "inference-even", "combine", "the output of microbatch 0 on rank 0 was overwritten later"),
    Expectation("EXCH-32", "inference-in-turn-even", "combine", "microbatch 0 on rank 0", "no backward followed"),
)
class InferenceInOneWorkspace(LendsUntilTheNext):
    """Without gradients an output is valid until the next forward of that kind."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        combine = AllToAllExchange.combine if torch.is_grad_enabled() else LendsUntilTheNext.combine
        return combine(self, rows, handle)


@planted(
    Expectation("EXCH-05", "even", "combine", "y on rank 0 is 2.000 x", "y on rank 1 is -1.000 x", "shard 1 alone"),
    real="NVIDIA/Megatron-LM commit 28c8dd71f0 (issue #109)",
    layout=EP2_ETP2,
)
class ShardsNotSummed(AllToAllExchange):
    """Every rank takes its own shard's part of the answers for the sum."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shards = self.topology.group("etp")
        own = self._ungroup(rows, handle.plan.order_R).split(handle.plan.gathered_S)[shards.rank()]
        rows_PD = collectives.all_to_all(own, handle.plan.received_C, handle.plan.sent_C, self.topology.group("ep"))
        return self._unpermute(rows_PD, handle.permuted)


@planted(
    Expectation("EXCH-05", "even", "combine", "slot 0", "is zero; likely cause: the answer of expert", "was left out")
)
class LastSlotWins(AllToAllExchange):
    """The answers of a token's slots overwrite each other in place of being added."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        rows_PD = self._weigh(rows_PD, permuted.weights_P)
        last_P = permuted.pairs.slot_P == permuted.pairs.shape[1] - 1
        y_TD = rows_PD.new_zeros(permuted.pairs.shape[0], rows_PD.shape[1])
        return y_TD.index_put((permuted.pairs.token_P[last_P],), rows_PD[last_P]).reshape(permuted.shape)


@planted(
    Expectation("EXCH-05", "even", "combine", "y of rank 0 token 4 is zero; likely cause: every answer was left out"),
    real="pytorch/torchtitan commit 9233d8318 (#1586)",
    layout=TP2_EP2,
)
class TokensDividedTwice(AllToAllExchange):
    """The number of tokens is local already and is divided by tp once more: the rest stays zero."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        y = super()._unpermute(rows_PD, permuted)
        kept = len(y) // self.topology.sizes["tp"]
        return torch.cat([y[:kept], y[kept:] * 0])


@planted(Expectation("EXCH-05", "even", "combine", "to which no slot is routed), is", "of rank 0 token"))
class AnswersReadInTokenOrder(AllToAllExchange):
    """Answers that come home in expert order are read in token order."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        pairs = permuted.pairs
        order_P = (pairs.token_P * pairs.shape[1] + pairs.slot_P).argsort()
        in_token_order = replace(pairs, token_P=pairs.token_P[order_P], slot_P=pairs.slot_P[order_P])
        return super()._unpermute(rows_PD, replace(permuted, pairs=in_token_order))


# ---- empty slots ---------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-06", "dropped-even", "dispatch", "expert 0, to which no slot is routed", "is not zero"),
    Expectation("EXCH-01", "dropped-even", "dispatch", "for expert 0", "which is not routed to this expert"),
    real="huggingface/transformers PR #40545",
)
class EmptySlotsToExpert0(AllToAllExchange):
    """The mark of an empty slot is taken for an id and ends up at expert 0."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        return super()._permute(x, replace(routing, ids_TK=routing.ids_TK.clamp_min(0)), room)


@planted(
    Expectation(
        *("EXCH-06", "dropped-even", "gradient"),
        *("the gradient of the routing weight of rank 0 token", "instead of 0, since the slot is empty"),
    ),
    real="huggingface/transformers issue #48687",
)
class EmptySlotsGetGradient(AllToAllExchange):
    """An empty slot has a weight of zero and an answer that is not: so its weight has a gradient."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        weights_TK = routing.weights_TK
        zero_TK = weights_TK - weights_TK.detach()  # the value is zero, the gradient is not
        masked_TK = torch.where(routing.ids_TK >= 0, weights_TK, zero_TK)
        return super()._permute(x, Routing(routing.ids_TK.clamp_min(0), masked_TK, routing.experts), room)


@planted(
    Expectation("EXCH-07", "dropped-even", "combine", "y of rank 0 is not finite at 1 token, although its terms fit"),
    Expectation("EXCH-06", "dropped-even", "combine", "y of rank 0 token 0 is not finite"),
    real="NVIDIA/TransformerEngine commit c988548f7 (#2547)",
)
class UninitialisedOutputs(AllToAllExchange):
    """The output of a token without a slot is memory that nobody has written."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        missing_T = torch.ones(permuted.pairs.shape[0], dtype=torch.bool)
        missing_T[permuted.pairs.token_P] = False
        y = super()._unpermute(rows_PD, permuted)
        return y.masked_fill(missing_T.reshape(*y.shape[:-1], 1), torch.nan)


@planted(
    Expectation("EXCH-05", "even", "combine", "likely cause: only this rank's part is in it"),
    Expectation("EXPT-01", "own-even", "experts", "likely cause: only this rank's part is in it"),
    Expectation("GRAD-18", "layer-even", "combine", "likely cause: only this rank's part is in it"),
)
class SumOverRanksLeftOut(AllGatherExchange):
    """Every rank takes its own tokens out of its own outputs, and the sum over ranks is left out."""

    def _back(self, rows: Tensor, handle: Any) -> Tensor:
        everything = self._unpermute(rows, handle.permuted)
        rank = self.topology.group("ep_etp").rank()
        return everything.split(handle.sizes_W)[rank].reshape(handle.shape)  # type: ignore[no-any-return]


@planted(Expectation("EXCH-05", "even", "dispatch", "in place of that of expert", "was computed by another expert"))
class NextExpertAnswers(AllToAllExchange):
    """The first slot of the first token goes to the next expert on the same rank that the token did not select."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if not len(routing.ids_TK):
            return super().dispatch(x, routing)
        ids_TK, held = routing.ids_TK.clone(), self.placement.held
        first = int(ids_TK[0, 0])
        others = [first - first % held + n for n in range(held)]
        free = [e for e in others if first >= 0 and e not in ids_TK[0].tolist()]
        if free:
            ids_TK[0, 0] = free[0]
        return super().dispatch(x, Routing(ids_TK, routing.weights_TK, routing.experts))


@planted(
    Expectation(
        *("EXCH-05", "even", "combine", "y of rank 0 token 0", "is the answer for rank"),
        "likely cause: rows came back in another order than they were sent",
    ),
    Expectation("GRAD-01", "even", "gradient", "likely cause: gradients came back in another order than the rows"),
)
class OrderAppliedTwice(AllToAllExchange):
    """The answers are put in the order of the experts once more, in place of the order in which rows arrived."""

    def _ungroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        return rows_RD.index_select(0, order_R)
