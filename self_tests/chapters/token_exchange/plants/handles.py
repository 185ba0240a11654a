"""EXCH: bugs in a fused token exchange that a caller meets who keeps its handles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.fused.low_latency import Filled, LowLatencyExchange
from moe_conformance.backends.native.fused.surface import ReusableExchange
from moe_conformance.backends.native.fused.token_exchange import Arrived, Handle, TokenExchange
from moe_conformance.contract import Received, Routing
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted

# ---- handles -------------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-27", "reused-handle", "dispatch", "call 2: row 0 on rank 0 is rank 0 token 6 instead of"))
class SlotsByPosition(TokenExchange):
    """A cached dispatch takes tokens from the end of the batch for the places of those from its start."""

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
        plain: bool = False,
    ) -> Arrived:
        return super().dispatch(x_TD if handle is None else x_TD.flip(0), ids_TK, weights_TK, handle, plain)


@planted(
    Expectation("EXCH-27", "reused-handle", "run", "in dispatch:2"),
    real="deepseek-ai/DeepEP PR #580 (Hybrid-EP): state for one operation in flight",
)
class OneOperationInFlight(TokenExchange):
    """The exchange keeps the layout of its last dispatch on itself, and takes it for that of any handle."""

    kept: Handle | None = None

    def _laid_out(self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None, known: Handle | None) -> Handle:
        self.kept = super()._laid_out(x_TD, ids_TK, weights_TK, known and self.kept)
        return self.kept


@planted(Expectation("EXCH-08", "biases", "run", "changed the upstream gradient of rank 0 in place"))
class UpstreamReused(ReusableExchange):
    """The memory of the upstream gradient is taken for that of the tokens' gradients."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        y_TD = super().combine(rows_RD, handle, biases)
        if y_TD.requires_grad:
            y_TD.register_hook(_double)
        return y_TD


def _double(gradient: Tensor) -> None:
    gradient.mul_(2)


@planted(Expectation("EXCH-28", "handle-of-another", "combine", "the rows of call 0 with the handle of call 1"))
class AnyHandleWillDo(TokenExchange):
    """Combine takes what rows it gets for those of its handle: it leaves out the last, or adds zeros."""

    def combine(
        self, rows_RD: Tensor, handle: Handle, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return super().combine(F.pad(rows_RD, (0, 0, 0, handle.rows - len(rows_RD))), handle, weights_RK)


@planted(Expectation("EXCH-27", "reused-handle", "groups", "expert 0 is on none of the ranks [0, 1]"))
class HoldsNothing(ReusableExchange):
    """No rank says that it holds an expert, and no token goes anywhere."""

    @property
    def local_experts(self) -> tuple[int, ...]:
        return ()

    def dispatch(
        self, x_TD: Tensor, ids_TK: Tensor | None = None, weights_TK: Tensor | None = None, handle: Handle | None = None
    ) -> Received:
        nowhere_TK = None if ids_TK is None else torch.full_like(ids_TK, -1)
        return replace(super().dispatch(x_TD, nowhere_TK, weights_TK, handle), counts_N=None)


@planted(
    Expectation(
        "EXCH-27", "reused-handle", "dispatch", "was delivered to rank 0 with local experts and weights [(-1, 1."
    )
)
class WeightsOfOthersStay(TokenExchange):
    """A row keeps the weights of slots that are meant for experts of other ranks."""

    def _own_slots(self, weights_RK: Tensor, handle: Handle) -> Tensor:
        return weights_RK


@planted(
    Expectation("EXCH-27", "reused-handle", "dispatch", "call 0: rank 0 receives rows of torch.float64 instead of")
)
class RowsWidened(ReusableExchange):
    """Rows are handed over in the dtype in which they will be added up."""

    def dispatch(
        self, x_TD: Tensor, ids_TK: Tensor | None = None, weights_TK: Tensor | None = None, handle: Handle | None = None
    ) -> Received:
        received = super().dispatch(x_TD, ids_TK, weights_TK, handle)
        return replace(received, rows_RD=received.rows_RD.double())

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        return super().combine(rows_RD.float(), handle, biases)


@planted(
    Expectation(
        "GRAD-03", "weighed", "gradient", "of weights_TK of dispatch (call 1) through combine", "is None on rank 0"
    )
)
class WeightsTravelDetached(ReusableExchange):
    """Weights travel as numbers beside the rows, past autograd."""

    def dispatch(
        self, x_TD: Tensor, ids_TK: Tensor | None = None, weights_TK: Tensor | None = None, handle: Handle | None = None
    ) -> Received:
        return super().dispatch(x_TD, ids_TK, None if weights_TK is None else weights_TK.detach(), handle)


@planted(Expectation("GRAD-03", "weighed", "gradient", "of weights_TK of dispatch (call 1) through combine", "column"))
class WeightGradientsOfTheFirstRank(TokenExchange):
    """Gradients of weights come home from the first rank that has the token, where others have slots of it too."""

    def combine(
        self, rows_RD: Tensor, handle: Handle, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y_TD, of_weights_TK = super().combine(rows_RD, handle, weights_RK)
        if weights_RK is None:
            return y_TD, of_weights_TK
        return y_TD, super().combine(weights_RK * (self.group.rank() == 0), handle)[0]


# ---- what is added -------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-31", "biases", "combine", "y of call 1 at rank 0 token 0"), layout=EP2_ETP2)
class BiasNeedsARow(ReusableExchange):
    """A bias is added as the first row of a token comes back; a token that went nowhere gets none."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        routed_T1 = (handle.token_M.bincount(minlength=handle.tokens) > 0).unsqueeze(1)
        return super().combine(rows_RD, handle, tuple(bias_TD * routed_T1 for bias_TD in biases))


@planted(Expectation("EXCH-31", "biases", "combine", "y of call 1 at rank 0 token 1"), layout=EP2_ETP2)
class BiasWithEveryCopy(ReusableExchange):
    """Every rank that returns a row of a token adds the bias to it."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        copies_T1 = handle.token_M.bincount(minlength=handle.tokens).clamp_min(1).unsqueeze(1)
        return super().combine(rows_RD, handle, tuple(bias_TD * copies_T1 for bias_TD in biases))


@planted(Expectation("EXCH-31", "biases", "combine", "y of call 1 has the dtype torch.float64 instead of"))
class SumKeptWide(ReusableExchange):
    """What was added up is returned in the dtype of the sum."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        return super().combine(rows_RD, handle, biases).double()


@planted(Expectation("EXCH-31", "biases", "gradient", "biases.1 of call 3 is None"))
class SecondBiasDetached(ReusableExchange):
    """Of several biases all but the first are added past autograd."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        return super().combine(rows_RD, handle, (*biases[:1], *(bias_TD.detach() for bias_TD in biases[1:])))


@planted(Expectation("EXCH-31", "biases", "run", "combine of call 1 changed its input biases.0 on rank 0"))
class AddedUpInTheBias(ReusableExchange):
    """The first bias serves as the memory in which a token's rows are added up."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        y_TD = super().combine(rows_RD, handle, biases)
        for bias_TD in biases[:1]:
            bias_TD.data.copy_(y_TD.detach())
        return y_TD


# ---- fixed places --------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-29", "places", "dispatch", "in place", "of expert", "is missing"), layout=EP2_ETP2)
class RunsOverlap(LowLatencyExchange):
    """The rows of every source are put at the first places of their expert, over those of the sources before."""

    def _begins(self, runs_NW: Tensor) -> Tensor:
        return torch.zeros_like(runs_NW)


@planted(
    Expectation(
        "EXCH-29", "places", "dispatch", "the number of places per expert differs with one tokens_max =", " on rank "
    ),
    layout=EP2_ETP2,
)
class PlacesOfTheLoad(LowLatencyExchange):
    """There are as many places as the busiest expert of a rank fills."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        (N, C), most = filled.shape, int(filled.sent.plan.counts_N.max())
        place_R = filled.place_R // C * most + filled.place_R % C
        return rows_NCD[:, :most], replace(filled, place_R=place_R, shape=(N, most))


@planted(Expectation("EXCH-29", "places", "dispatch", "reports the runs (begin, length) ["), layout=EP2_ETP2)
class RunsToldBackwards(LowLatencyExchange):
    """The table of runs counts sources from the last, and the rows lie from the first."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        return rows_NCD, replace(filled, begin_NW=filled.begin_NW.flip(1))


@planted(Expectation("EXCH-29", "places", "combine", "y of call 2 at rank", "column 0, is nan instead of"))
class PlacesTimesZero(LowLatencyExchange):
    """Places that are not filled are multiplied by zero and added; what nobody wrote may be NaN."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        unfilled = torch.ones(handle.shape[0] * handle.shape[1], 1, dtype=rows.dtype)
        unfilled[handle.place_R] = 0
        return super().combine(rows, handle) + 0 * (rows.reshape(-1, rows.shape[-1]) * unfilled).sum()


@planted(Expectation("EXCH-29", "places", "combine", "y of call 2 at rank 0 token 0, column 0, is nan instead of"))
class ClearedAndTrusted(LowLatencyExchange):
    """Places that are not filled are zeros in dispatch, and combine adds what experts made of them to some token."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        return rows_NCD.masked_fill(self._unfilled(filled).reshape(*filled.shape, 1), 0), filled

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle) + rows.flatten(0, -2)[self._unfilled(handle)].sum(0)

    def _unfilled(self, filled: Filled) -> Tensor:
        unfilled = torch.ones(filled.shape[0] * filled.shape[1], dtype=torch.bool)
        unfilled[filled.place_R] = False
        return unfilled


@planted(Expectation("EXCH-23", "tokens-over-limit", "dispatch", "7 tokens on a rank", "above tokens_max = 6"))
class MoreIsWelcome(LowLatencyExchange):
    """The number of tokens that were said to come is the least size of the buffer, not its limit."""

    def _places(self, ids_TK: Tensor, tokens_max: int | None) -> int:
        return max(super()._places(ids_TK, None), 2 * (tokens_max or 0))


@planted(Expectation("EXCH-23", "tokens-over-limit", "run", "in dispatch:0"))
class LimitItselfRefused(LowLatencyExchange):
    """As many tokens as were said to come are taken for too many."""

    def _places(self, ids_TK: Tensor, tokens_max: int | None) -> int:
        return super()._places(ids_TK, None if tokens_max is None else tokens_max - 1)


# ---- eight bits on the wire ----------------------------------------------------------------------------------------


@planted(Expectation("EXCH-30", "float8-rows", "dispatch", "the scale of block", "; expected "), layout=EP2_ETP2)
class ScalesOfTheRowBefore(Float8Wire):
    """A row is packed with the scales of the row before it in the message; its numbers are its own."""

    def pack(self, rows_RD: Tensor) -> Tensor:
        bytes_R, D = super().pack(rows_RD), rows_RD.shape[1]
        return torch.cat([bytes_R[:, :D], bytes_R[:, D:].roll(1, dims=0)], dim=1)


@planted(
    Expectation("EXCH-30", "float8-rows", "dispatch", "row 0 on rank 0, of rank 0 token 1: column 1 is"),
    real="NVIDIA/TransformerEngine commit c988548f7 (#2547): rows and their scales part ways",
)
class ScalesByColumn(Float8Wire):
    """The scales of the blocks of a row are taken in turn by its columns, instead of each for a block of them."""

    def unpack(self, bytes_R: Tensor, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows_RD, scales_RB = super().unpack(bytes_R, hidden, dtype)
        turns_RD = scales_RB.repeat(1, self.block)[:, :hidden]
        return (rows_RD / self._spread(scales_RB, hidden) * turns_RD).to(dtype), scales_RB


@planted(Expectation("EXCH-30", "float8-rows", "dispatch", "column"))
class RoundedTowardsZero(Float8Wire):
    """Numbers are cut off to three bits of mantissa instead of rounded to the nearest."""

    def _round(self, scaled_RD: Tensor) -> Tensor:
        nearest_RD = super()._round(scaled_RD)
        away_RD = nearest_RD.float().abs() > scaled_RD.abs()
        towards = (nearest_RD.view(torch.uint8) - away_RD.to(torch.uint8)).view(torch.float8_e4m3fn)
        return towards


@planted(Expectation("EXCH-30", "float8-rows", "dispatch", "the scale of block"))
class OneScaleForARow(Float8Wire):
    """All blocks of a row get the scale of its largest element; small blocks lose their numbers."""

    def _scales(self, rows_RD: Tensor) -> Tensor:
        scales_RB = super()._scales(rows_RD)
        return scales_RB.amax(1, keepdim=True).repeat(1, scales_RB.shape[1])


@planted(Expectation("EXCH-30", "float8-rows", "dispatch", "was delivered to rank 0 with local experts and weights"))
class WeightsOfOtherRows(TokenExchange):
    """Beside rows of eight bits the weights lie in the opposite order."""

    def _own_slots(self, weights_RK: Tensor, handle: Handle) -> Tensor:
        return super()._own_slots(weights_RK if self.wire is None else weights_RK.flip(0), handle)


@planted(Expectation("EXCH-30", "float8-rows", "gradient", "the gradient of rank 0 token"))
class GradientOfRounding(TokenExchange):
    """The backward divides by the scales once more."""

    def combine(
        self, rows_RD: Tensor, handle: Handle, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y_TD, weights_TK = super().combine(rows_RD, handle, weights_RK)
        return (y_TD if weights_RK is None else y_TD * 448), weights_TK


@planted(Expectation("COST-09", "float8-rows", "dispatch", "bytes in dispatch for", "; expected at most "))
class RoundedAndSentWide(TokenExchange):
    """Rows are rounded as on the wire of eight bits, and travel in the dtype that they had."""

    def _send_rows(self, rows_MD: Tensor, handle: Handle, wire: Float8Wire | None) -> tuple[Tensor, Tensor | None]:
        if wire is None:
            return super()._send_rows(rows_MD, handle, wire)
        rounded_MD, scales_MB = wire.unpack(wire.pack(rows_MD), rows_MD.shape[1], rows_MD.dtype)
        return self._send(rounded_MD, handle), self._send(scales_MB, handle)


@planted(Expectation("COST-09", "float8-rows", "dispatch", "17704 bytes in dispatch for 6 rows"))
class SentWideInOneSize(TokenExchange):
    """Rows are rounded, and travel wide in messages of one size, with tokens or without."""

    def _send_rows(self, rows_MD: Tensor, handle: Handle, wire: Float8Wire | None) -> tuple[Tensor, Tensor | None]:
        if wire is None:
            return super()._send_rows(rows_MD, handle, wire)
        rounded_MD, scales_MB = wire.unpack(wire.pack(rows_MD), rows_MD.shape[1], rows_MD.dtype)
        rooms = [16] * self.group.size()
        parts = [F.pad(part, (0, 0, 0, 16 - len(part))) for part in rounded_MD.split(handle.sent_W)]
        arrived = collectives.all_to_all(torch.cat(parts), rooms, rooms, self.group).split(rooms)
        rows_RD = torch.cat([part[:rows] for part, rows in zip(arrived, handle.received_W, strict=True)])
        return rows_RD, self._send(scales_MB, handle)
