"""EXCH: bugs in a fused token exchange that a caller meets who keeps its handles."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.low_latency import Filled, LowLatencyExchange
from moe_conformance.backends.native.reusable import ReusableExchange
from moe_conformance.backends.native.token_exchange import Arrived, Handle, TokenExchange
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, collect, planted

# ---- handles -------------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-27", "reused-handle", "dispatch", "call 2: row 0 on rank 0 is rank 0 token 6, where"))
class SlotsByPosition(TokenExchange):
    """A cached dispatch takes tokens from the end of the batch for the places of those from its start."""

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
    ) -> Arrived:
        return super().dispatch(x_TD if handle is None else x_TD.flip(0), ids_TK, weights_TK, handle)


@planted(
    Expectation("EXCH-27", "reused-handle", "run", "in dispatch:2"),
    real="deepseek-ai/DeepEP PR #580 (Hybrid-EP): state for one operation in flight",
)
class OneOperationInFlight(TokenExchange):
    """The exchange keeps the layout of its last dispatch on itself, and takes it for that of any handle."""

    kept: Handle | None = None

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
    ) -> Arrived:
        arrived = super().dispatch(x_TD, ids_TK, weights_TK, handle and self.kept)
        self.kept = arrived.handle
        return arrived


@planted(Expectation("EXCH-28", "handle-of-another", "combine", "the rows of call 0 with the handle of call 1"))
class AnyHandleWillDo(TokenExchange):
    """Combine takes what rows it gets for those of its handle: it leaves out the last, or adds zeros."""

    def combine(
        self, rows_RD: Tensor, handle: Handle, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return super().combine(F.pad(rows_RD, (0, 0, 0, handle.rows - len(rows_RD))), handle, weights_RK)


# ---- what is added -------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-31", "biases", "combine", "y of call 1 at rank 0 token 0"),
    layout=EP2_ETP2,
)
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


@planted(Expectation("EXCH-31", "biases", "gradient", "biases.1 of call 3 is absent"))
class SecondBiasDetached(ReusableExchange):
    """Of several biases all but the first are added past autograd."""

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        return super().combine(rows_RD, handle, (*biases[:1], *(bias_TD.detach() for bias_TD in biases[1:])))


# ---- fixed places --------------------------------------------------------------------------------------------------


@planted(Expectation("EXCH-29", "places", "dispatch", "in place", "of expert", "is missing"), layout=EP2_ETP2)
class RunsOverlap(LowLatencyExchange):
    """The rows of every source are put at the first places of their expert, over those of the sources before."""

    def _begins(self, runs_NW: Tensor) -> Tensor:
        return torch.zeros_like(runs_NW)


@planted(Expectation("EXCH-29", "places", "dispatch", "says that the runs (begin, length) of expert"), layout=EP2_ETP2)
class RunsToldBackwards(LowLatencyExchange):
    """The table of runs counts sources from the last, and the rows lie from the first."""

    def fill(self, x: Tensor, routing: Routing, tokens_max: int | None = None) -> tuple[Tensor, Filled]:
        rows_NCD, filled = super().fill(x, routing, tokens_max)
        return rows_NCD, replace(filled, begin_NW=filled.begin_NW.flip(1))


@planted(Expectation("EXCH-29", "places", "combine", "y of call 2 at rank", "column 0, is nan, expected"))
class PlacesTimesZero(LowLatencyExchange):
    """Places that are not filled are multiplied by zero and added; what nobody wrote may be NaN."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        unfilled = torch.ones(handle.shape[0] * handle.shape[1], 1, dtype=rows.dtype)
        unfilled[handle.place_R] = 0
        return super().combine(rows, handle) + 0 * (rows.reshape(-1, rows.shape[-1]) * unfilled).sum()


@planted(Expectation("EXCH-23", "tokens-over-limit", "dispatch", "7 tokens of a rank", "6 were to come"))
class MoreIsWelcome(LowLatencyExchange):
    """The number of tokens that were said to come is the least size of the buffer, not its limit."""

    def _places(self, ids_TK: Tensor, tokens_max: int | None) -> int:
        return max(super()._places(ids_TK, None), 2 * (tokens_max or 0))


@planted(Expectation("EXCH-23", "tokens-over-limit", "run", "in dispatch:0"))
class LimitItselfRefused(LowLatencyExchange):
    """As many tokens as were said to come are taken for too many."""

    def _places(self, ids_TK: Tensor, tokens_max: int | None) -> int:
        return super()._places(ids_TK, None if tokens_max is None else tokens_max - 1)


PLANTS = collect(globals())
