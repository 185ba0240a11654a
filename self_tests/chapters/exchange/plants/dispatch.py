"""EXCH: bugs on the way to the experts, in rows, counts and weights. The way back is in combine.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import (
    AllGatherExchange,
    AllToAllExchange,
    LocalExchange,
    Permuted,
    Plan,
)
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

# ---- who gets which row --------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-01", "even", "dispatch", "rank 0 token", "and rank 1 token", "are exchanged"))
class SwappedSources(AllToAllExchange):
    """The rows of two source ranks change places on arrival, so that experts get each other's."""

    def _plan(self, counts_E: Tensor) -> Plan:
        plan = super()._plan(counts_E)
        first_R, second_R, *rest = torch.arange(len(plan.order_R)).split(plan.received_C)
        return replace(plan, order_R=torch.cat([second_R, first_R, *rest])[plan.order_R])


@planted(
    Expectation("EXCH-01", "even", "dispatch", "was not delivered to expert 3 on rank 0", "beyond the reported counts"),
    Expectation("EXCH-04", "even", "dispatch", "rank 0 reports", "for expert 3; expected: ", "; expected: "),
)
class LastRowDropped(AllToAllExchange):
    """The groups of rows end one row early, and no expert computes the last."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        counts_N = delivery.counts_N.clone()
        counts_N[-1] = max(int(counts_N[-1]) - 1, 0)
        return Delivery.grouped(delivery.rows_RD, counts_N), handle


@planted(
    Expectation("EXCH-01", "uneven", "dispatch", "rank 0 token 0 slot 1 was not delivered to expert"),
    real="NVIDIA/Megatron-LM commit a98c5ba19c",
    layout=SINGLE,
)
class FirstSlotOnly(LocalExchange):
    """Without expert parallelism tokens are passed on as if every one had a single expert."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        ids_TK = routing.ids_TK.clone()
        ids_TK[:, 1:] = -1
        return super()._permute(x, replace(routing, ids_TK=ids_TK), room)


@planted(
    Expectation("EXCH-01", "even", "dispatch", "was delivered twice to expert"),
    Expectation("EXCH-05", "even", "dispatch", "every element of y is 2.000 x the expected value: ep or K or"),
    real="deepspeedai/DeepSpeed PRs #2074, #5626",
)
class DuplicatesKept(AllToAllExchange):
    """Pairs that two ranks hold are sent by both, and nobody drops the second copy."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        twice = Routing(routing.ids_TK.repeat(1, 2), routing.weights_TK.repeat(1, 2), routing.experts)
        return super()._permute(x, twice, room)


@planted(
    Expectation(
        "EXCH-01", "even", "dispatch", "on rank 1", "which is not routed to this expert", "was not delivered to expert"
    ),
    real="flashinfer-ai/flashinfer issue #3547",
)
class NoExpertOffset(AllGatherExchange):
    """Global ids are held against the local range, so that every rank takes the tokens of the first."""

    def _local_ids(self, ids_TK: Tensor) -> Tensor:
        return torch.where(ids_TK < self.placement.held, ids_TK, -1)


@planted(
    Expectation(
        "EXCH-01", "even", "dispatch", "delivered to rank 0 for expert 0", "which is not routed to this expert"
    ),
    real="huggingface/transformers PR #40545",
)
class OthersToFirstExpert(AllGatherExchange):
    """The fill value of slots that belong to other ranks is 0, and that is this rank's first expert."""

    def _local_ids(self, ids_TK: Tensor) -> Tensor:
        return super()._local_ids(ids_TK).clamp_min(0)


# ---- what is in a row ----------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-02", "even", "dispatch", "delivered to rank 0 for expert 0 is", "31 more of the same kind"),
    real="deepspeedai/DeepSpeed commit 619e3199d (#8195)",
)
class HiddenSliced(AllToAllExchange):
    """A cut that was meant for the rows goes through the hidden dimension, and the element count still fits."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        rows_RD = super()._regroup(rows_RD, order_R)
        return torch.cat(rows_RD.chunk(2, dim=1)).reshape(rows_RD.shape)


@planted(
    Expectation("EXCH-02", "even", "dispatch", "is the sum of rank"),
    Expectation("EXCH-01", "even", "dispatch", "was not delivered to expert", "1 row of no token"),
    Expectation(
        "EXCH-04",
        "even",
        "dispatch",
        "reports 4 rows for expert 3, of which 1 holds only zeros; expected: 4 routed pairs",
    ),
    real="microsoft/Tutel commit 2f5402a (#26)",
)
class TwoRowsInOnePlace(AllToAllExchange):
    """Two rows get the same destination and are added up there."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        place_R = torch.arange(len(rows_RD))
        place_R[-1:] = place_R[-2:-1]
        return torch.zeros_like(rows_RD).index_add(0, place_R, super()._regroup(rows_RD, order_R))


@planted(Expectation("EXCH-02", "even", "dispatch", "in columns 0..", "and rank", "..31"))
class HalfARowLate(AllToAllExchange):
    """Rows travel in two halves, and the second halves arrive one row late."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        left_RH, right_RH = super()._regroup(rows_RD, order_R).chunk(2, dim=1)
        return torch.cat([left_RH, right_RH.roll(1, 0)], dim=1)


# ---- counts --------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-04", "one-by-one-uneven", "dispatch", "in microbatch 1", "and delivers"),
    real="pytorch/torchtitan issue #3336",
)
class CountsOfFirstStep(AllToAllExchange):
    """The counts come from an earlier routing than the rows."""

    counts_N: Tensor | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        if self.counts_N is None:
            self.counts_N = delivery.counts_N
        return replace(delivery, counts_N=self.counts_N), handle


@planted(
    Expectation("EXCH-04", "even", "dispatch", "rank 0 reports 16 rows for expert 0 and delivers"),
    real="NVIDIA/Megatron-LM commit 567d4d4681 (#4038)",
)
class AlignedCounts(AllToAllExchange):
    """Counts are rounded up to the alignment of a quantised product; the rows are not."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        return replace(delivery, counts_N=(delivery.counts_N + 15) // 16 * 16), handle


@planted(
    Expectation(
        "EXCH-04",
        "even",
        "dispatch",
        "rank 0 reported inconsistent counts, shapes or claims in forward:0: Malformed: counts [8, 8",
    ),
    real="pytorch/torchtitan commit 60645bc78 (#1718)",
)
class CountsOverrun(AllToAllExchange):
    """Padded counts add up to more rows than the buffer has."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        return Delivery.grouped(delivery.rows_RD, (delivery.counts_N + 7) // 8 * 8), handle


# ---- weights -------------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "EXCH-03", "input-weights-even", "dispatch", "slot 0", "has the weight", "likely cause: the weight of slot 1"
    ),
    Expectation("EXCH-05", "even", "combine", "the weight of slot 0; largest error: ", "30 more of the same kind"),
)
class WeightsOneSlotOff(AllToAllExchange):
    """Every pair gets the weight of its token's next slot."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        return routing.weights_TK.roll(1, dims=1)[pairs.token_P, pairs.slot_P]


@planted(
    Expectation("EXCH-03", "input-weights-even", "dispatch", "a weight of", "other tokens; "),
    real="huggingface/transformers PR #45473",
)
class WeightsUnsorted(AllToAllExchange):
    """Weights in token order are paired by position with rows in expert order."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        return routing.weights_TK[routing.ids_TK >= 0]


@planted(
    Expectation(
        *("EXCH-05", "even", "combine"),
        *("is multiplied by 1 instead of", "likely cause: the weight was not applied; 30 more"),
    ),
    Expectation("GRAD-03", "even", "gradient", "the gradient of the weights on rank 0 in microbatch 0 is None"),
)
class Unweighted(AllToAllExchange):
    """Combine adds the answers up as they are."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return rows_PD


@planted(Expectation("EXCH-05", "input-weights-even", "combine", "the weight was applied twice; 30 more"))
class WeighedTwice(AllToAllExchange):
    """Weights that were applied to the rows on the way out are applied to the answers again."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        if self.weighs_input:
            rows_PD = self._weigh(rows_PD, permuted.weights_P)
        return super()._unpermute(rows_PD, permuted)
