"""EXCH: bugs at the ends of what an exchange must bear: many tokens, odd weights, no pairs, three microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted, Plan
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

# ---- many tokens ---------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "EXCH-04", "many-tokens-one-expert", "dispatch", "rank 1 reports -96 rows for expert 6 and delivers 160"
    )
)
class CountsInInt8(AllToAllExchange):
    """The counts that are handed over are kept in signed bytes."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        return replace(delivery, counts_N=delivery.counts_N.to(torch.int8)), handle


@planted(
    Expectation(
        *("EXCH-01", "many-tokens-one-expert", "dispatch"),
        *("rank 2 token 44 slot 0 was not delivered to expert", "255 more"),
    ),
    layout=EP2_EDP2,
)
class PairsPerExpertInUint8(AllToAllExchange):
    """How many pairs there are of an expert is kept in a byte, and of 300 pairs 44 are sent."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        ids_TK = routing.ids_TK.clone()
        for expert in range(routing.experts):
            place_P2 = (ids_TK == expert).nonzero()
            lost_P2 = place_P2[len(place_P2) % 256 :]
            ids_TK[lost_P2[:, 0], lost_P2[:, 1]] = -1
        return super()._permute(x, replace(routing, ids_TK=ids_TK), room)


# ---- weights -------------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("EXCH-01", "zero-and-negative-weights-even", "dispatch"),
        *("rank 0 token 0 slot 0 was not delivered to expert", "7 more"),
    ),
    Expectation(
        *("GRAD-03", "zero-and-negative-weights-even", "gradient"),
        *("the gradient of the routing weight of rank 0 token 0 slot 0", "is 0 instead of -1.25"),
    ),
)
class MapOfNonzeroWeights(AllToAllExchange):
    """A pair is there where the weight is not zero, so that one that weighs nothing is not sent."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        ids_TK = torch.where(routing.weights_TK == 0, -1, routing.ids_TK)
        return super()._permute(x, replace(routing, ids_TK=ids_TK), room)


@planted(
    Expectation(
        "EXCH-05", "zero-and-negative-weights-even", "combine", "slot 1", "is zero; likely cause: the answer of expert"
    )
)
class NegativeWeightsAtZero(AllToAllExchange):
    """Weights are taken to be probabilities, and those below zero are cut off."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        return super()._weights(routing, pairs).clamp_min(0)


@planted(
    Expectation("EXCH-05", "zero-and-negative-weights-even", "combine", "multiplied by 0.4375 instead of -0.4375"),
    Expectation("GRAD-03", "zero-and-negative-weights-even", "gradient", "is -1.5 instead of 1.5"),
)
class SignOfWeightsLost(AllToAllExchange):
    """The sign bit of a weight does not survive its encoding."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        return super()._weights(routing, pairs).abs()


# ---- nothing to send -----------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-09", "all-dropped-on-a-rank", "run", "rank 0 hung: returned while rank 1 waited"))
class EarlyReturnWithoutPairs(AllToAllExchange):
    """A rank whose slots are all empty returns at once, and its peers wait for it."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if (routing.ids_TK < 0).all():
            return Delivery.grouped(x[:0], torch.zeros(self.placement.held, dtype=torch.int64)), x
        return super().dispatch(x, routing)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return handle * 0 if isinstance(handle, Tensor) else super().combine(rows, handle)


@planted(Expectation("EXCH-09", "idle-rank-even", "run", "hung"), real="microsoft/Tutel commit 490917d (#265)")
class EmptyPartsNotSent(AllToAllExchange):
    """Rows go from rank to rank by themselves: a part without rows is not sent, and the receiver waits for it."""

    def delivered(self, rows: Tensor, plan: Plan, permuted: Permuted) -> tuple[Delivery, Any]:
        group = self.topology.group("ep")
        for peer in {*range(group.size())} - {group.rank()}:
            one = torch.zeros(1)
            sending = dist.isend(one, group_dst=peer, group=group) if plan.sent_C[peer] else None
            dist.recv(torch.empty(1), group_src=peer, group=group)
            if sending is not None:
                sending.wait()
        return super().delivered(rows, plan, permuted)


# ---- three microbatches --------------------------------------------------------------------------------------------


class TwoBuffers(AllToAllExchange):
    """Native's exchange with two static buffers that take turns, for plants that put something there."""

    turn = 0

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the memory of its turn; gradients go through as they are."""
        slot = f"_buffer_{self.turn % 2}"
        self.turn += 1
        buffer = getattr(self, slot, None)
        if buffer is None:
            buffer = tensor.new_empty(1 << 16)
            setattr(self, slot, buffer)
        return _InPlaceOf.apply(tensor, buffer[: tensor.numel()].view(tensor.shape))  # type: ignore[no-any-return, no-untyped-call]


class _InPlaceOf(torch.autograd.Function):
    """The identity, but the result lies in memory that was there before, and autograd is not told of the writing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, memory: Tensor) -> Tensor:
        memory.data.copy_(tensor)
        return memory.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@planted(
    Expectation("EXCH-32", "three-in-flight-even", "combine", "the output of microbatch 0 on rank 0 was overwritten")
)
class OutputsTakeTurns(TwoBuffers):
    """Outputs lie in two static buffers by turns, and the third is written over the first."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return self._kept(super().combine(rows, handle))


@planted(
    Expectation(
        *("EXCH-10", "three-in-flight-even", "gradient", "in flight at the same time, of which 1 and 2 are correct"),
        "likely cause: every gradient had the weight that the routing of microbatch 2 has in its place",
    )
)
class WeightsTakeTurns(TwoBuffers):
    """Weights are kept for the backward in two static buffers by turns, and the third are written over the first."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return super()._weigh(rows_PD, self._kept(weights_P))
