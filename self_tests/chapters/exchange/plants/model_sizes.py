"""EXCH, EXPT, GRAD: sizes of real models at which what is right of small ones is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.experts import Experts, in_blocks
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import Expectation, planted

# ---- in flight -----------------------------------------------------------------------------------------------------


class _InARing(torch.autograd.Function):
    """Rows times weights, of which a backward takes what lies in its place of a ring."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, weights_P: Tensor, ring: dict[int, Any], place: int) -> Tensor:
        ctx.ring, ctx.place = ring, place
        ring[place] = rows_PD.detach(), weights_P.detach()
        return (rows_PD * weights_P.unsqueeze(1)).to(rows_PD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_PD,) = gradients
        rows_PD, weights_P = ctx.ring[ctx.place]
        P = len(gradient_PD)
        fits_P = torch.zeros(P, dtype=weights_P.dtype)
        fits_P[: len(weights_P)] = weights_P[:P]
        fits_PD = torch.zeros_like(gradient_PD)
        fits_PD[: len(rows_PD)] = rows_PD[:P]
        d_weights_P = (gradient_PD * fits_PD).sum(1).to(weights_P.dtype)
        return (gradient_PD * fits_P.unsqueeze(1)).to(gradient_PD.dtype), d_weights_P, None, None


@planted(Expectation("GRAD-01", "six-in-flight-even", "gradient", "of microbatch 0"))
class RingOfFive(AllToAllExchange):
    """What a combine keeps lies in a ring of five places: the sixth combine in flight takes that of the first."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        ring, number = self.__dict__.setdefault("ring", {}), self.__dict__.get("number", 0)
        self.number = number + 1
        weighed: Tensor = _InARing.apply(rows_PD, weights_P, ring, number % 5)  # type: ignore[no-untyped-call]
        return weighed


@planted(Expectation("GRAD-01", "one-expert-a-rank-in-flight-even", "gradient", "of microbatch 0"))
class OneExpertOneBuffer(AllToAllExchange):
    """Where a rank holds one expert there is nothing to sort, and one buffer for the weights of a combine."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        if self.placement.held > 1:
            return super()._weigh(rows_PD, weights_P)
        buffer = self.__dict__.setdefault("buffer", {})
        weighed: Tensor = _InARing.apply(rows_PD, weights_P, buffer, 0)  # type: ignore[no-untyped-call]
        return weighed


@planted(
    Expectation("GRAD-01", "two-alive-even", "gradient", "of microbatch 0"),
    Expectation("GRAD-18", "layer-two-alive-uneven", "gradient", "rank"),
)
class RingOfTheClass(AllToAllExchange):
    """What combines keep for their backwards lies in a dictionary of the class, under the number of the combine.

    Each exchange counts its own.
    """

    ring: ClassVar[dict[int, Any]] = {}

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        number = self.__dict__.get("number", 0)
        self.number = number + 1
        weighed: Tensor = _InARing.apply(rows_PD, weights_P, self.ring, number)  # type: ignore[no-untyped-call]
        return weighed


# ---- tokens, slots and dtypes --------------------------------------------------------------------------------------


@planted(Expectation("EXCH-01", "thousands-of-tokens", "dispatch", "token"))
class TableOfTokens(AllToAllExchange):
    """The table of tokens has 4,096 places; who comes later is routed nowhere."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        late_T1 = (torch.arange(len(routing.ids_TK)) >= 4096).unsqueeze(1)
        return super().dispatch(x, replace(routing, ids_TK=routing.ids_TK.masked_fill(late_T1, -1)))


@planted(Expectation("EXCH-01", "thousands-of-tokens", "dispatch", "token"))
class OffsetsOfSixteenBits(AllToAllExchange):
    """Where a row begins, in elements, is a number of 16 bits."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        x_TD = x.reshape(-1, x.shape[-1])
        begin_T = torch.arange(len(x_TD)) * x_TD.shape[1] % 2**16
        return super().dispatch(x_TD[begin_T // x_TD.shape[1]].reshape(x.shape), routing)


@planted(Expectation("EXCH-05", "top-5-uneven", "combine", "y of rank"))
class SlotsInFours(AllToAllExchange):
    """Beyond four slots a token's expert outputs are summed four at a time, and what is left over is not."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        K = permuted.pairs.shape[1]
        summed_P = permuted.pairs.slot_P < (K if K <= 4 else K // 4 * 4)
        return super()._unpermute(torch.where(summed_P.unsqueeze(1), rows_QD, 0), permuted)


@planted(Expectation("EXCH-05", "even-float16", "combine", "y of rank"))
class ScaledBeyondFloat16(AllToAllExchange):
    """Expert outputs are scaled by 2^16 and back, for which float16 has no room."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return super()._weigh(rows_PD * 2.0**16, weights_P) * 2.0**-16


@planted(Expectation("EXCH-04", "to-capacity-even", "dispatch", "reports 1 row for expert 0"))
class CountsOfOneRank(AllToAllExchange):
    """Where experts are padded to capacity, the reported tokens per expert are those of one rank."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        if self.config.capacity.padded and delivery.counts_N is not None:
            ranks = len(self.topology.ranks("ep_etp"))
            delivery = replace(delivery, counts_N=delivery.counts_N // ranks // 2)
        return delivery, handle


@planted(Expectation("EXCH-04", "packed-sequences-uneven", "dispatch", "reports"))
class CountsOfPackedTokens(AllToAllExchange):
    """With packed sequences the reported tokens per expert include the first row of a gap."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        if self.config.padding.packed and delivery.counts_N is not None:
            delivery = replace(delivery, counts_N=delivery.counts_N + 1)
        return delivery, handle


# ---- experts -------------------------------------------------------------------------------------------------------


@planted(Expectation("EXPT-01", "own-dozen-experts-uneven", "experts", "y of rank"))
class EightExpertsOfARank(Experts):
    """A grouped product has room for eight experts."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        return torch.where(
            (torch.arange(len(rows_PD)) < sum(counts_N[:8]))[:, None], super()._loop(rows_PD, counts_N), 0
        )


@planted(
    Expectation("EXPT-01", "own-wide-even", "experts", "y of rank"),
    Expectation("EXPT-01", "own-wide-even-float16", "experts", "y of rank"),
)
class WholeTilesOfUnits(Experts):
    """Of more than a tile of 128 hidden units whole tiles are multiplied by down."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        units = self.down_NDF.shape[2]
        kept_F = torch.arange(units) < max(units // 128 * 128, min(units, 128))
        weights = zip(self.gate_NFD.unbind(), self.up_NFD.unbind(), (self.down_NDF * kept_F).unbind(), strict=True)
        return torch.cat([in_blocks(rows, *w) for rows, w in zip(rows_PD.split(counts_N), weights, strict=True)])
