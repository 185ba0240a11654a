"""Backends that do what few do and no requirement forbids, or not the one in question: they must pass."""

# ruff: noqa: D102 - a class says what its methods do otherwise
from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.fused.managers import DeepEPManager
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.router import capacity
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Delivery, Overflow, Routing


class WritesIntoAnswers(AllToAllExchange):
    """Combine scales the experts' answers where they lie, and takes that back: no bug."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows.mul_(2), handle) / 2


class LendsUntilTheNext(AllToAllExchange):
    """An output is valid until the next forward, and is overwritten then: no bug where its backward has ended."""

    lent: Tensor | None = None

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if self.lent is not None:
            self.lent.data.fill_(torch.nan)
        self.lent = super().combine(rows, handle).clone()
        return self.lent


class RowPerToken(DeepEPManager):
    """Rows as they came lie in a buffer: as large as asked for in rows, or with one for each token of the group."""

    has_budget, needs_equal_tokens, handed = True, True, "static"

    def __init__(self, config: Config, exchange: TokenExchange) -> None:
        super().__init__(config, exchange)
        if config.receive_buffer.overflow == "drop":
            raise CannotBuild("no row is dropped")
        self.rows = config.receive_buffer.rows

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        delivery, held = super().dispatch(x_TD, ids_TK, weights_TK)
        group, received = self.exchange.group, len(delivery.rows_RD)
        rows = group.size() * len(x_TD) if self.rows is None else self.rows
        if (most := collectives.largest(received, group, x_TD.device)) > rows:
            raise Overflow(f"{most} rows, and {rows} have room")
        filled = {"rows_RD": F.pad(delivery.rows_RD, (0, 0, 0, rows - received))}
        filled["ids_RJ"] = F.pad(delivery.ids_RJ, (0, 0, 0, rows - received), value=-1)
        filled["weights_RJ"] = F.pad(delivery.weights_RJ, (0, 0, 0, rows - received))
        return replace(delivery, **filled, shape=filled["rows_RD"].shape), held  # type: ignore[arg-type]

    def _take_back(self, rows: Tensor, held: Any) -> Tensor:
        return rows[: len(held.handle.ids_RK)]


class FirstChoicesFirst(Router):
    """By position the first choices of all tokens come before any second choice, and the router says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, drop_order="choices")

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        T, K = ids_TK.shape
        order_TK = torch.arange(K) * T + torch.arange(T)[:, None]
        by_place = self.config.capacity.drop_policy == "position"
        return capacity.keep(ids_TK, self.config.experts, room, -order_TK.double() if by_place else weights_TK)


class RoundedUpOverTensorRanks(AllToAllExchange):
    """A capacity that drops nothing is rounded up to what divides over tp, as if places were cut there; it says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, capacity_over="tp")

    def _room(self, routing: Routing) -> int | None:
        room, tp = super()._room(routing), self.topology.sizes["tp"]
        return room if room is None or self.config.capacity.factor is not None else -(-room // tp) * tp


class CapacityOnTheWire(AllToAllExchange):
    """Sends as many rows to every expert as any is sent from any rank; the experts receive the filled ones alone."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="capacity")

    def _room(self, routing: Routing) -> int | None:
        counts_E = torch.bincount(routing.ids_TK[routing.ids_TK >= 0], minlength=routing.experts)
        return capacity.lossless(self.config, counts_E, self.topology.group("ep_etp"))

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, sent = super().dispatch(x, routing)
        filled_R = (delivery.rows_RD != 0).any(1)  # zeros fill up
        assert delivery.counts_N is not None
        counts_N = torch.stack([part.sum() for part in filled_R.split(delivery.counts_N.tolist())])
        return Delivery.grouped(delivery.rows_RD[filled_R], counts_N), (sent, filled_R)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        sent, filled_R = handle
        whole_RD = rows.new_zeros(len(filled_R), rows.shape[1]).index_put(filled_R.nonzero(as_tuple=True), rows)
        return super().combine(whole_RD, sent)


class KeepsTheLast(Router):
    """By position the last slots of an expert stay: against DROP-06, and no matter of other ranks' tokens."""

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        return super()._keep(ids_TK.flip(0), weights_TK.flip(0), room).flip(0)


class InPlace(Native):
    """Native, whose exchange writes into answers."""

    session_class = NativeSession.building(WritesIntoAnswers)


class Lending(Native):
    """Native, whose exchange lends its outputs."""

    session_class = NativeSession.building(LendsUntilTheNext)


class Buffered(Native):
    """Native, whose DeepEP-like manager has a buffer for the most tokens that can come."""

    session_class = NativeSession.building(RowPerToken)


class FromBehind(Native):
    """Native, whose router keeps the last slots."""

    session_class = NativeSession.building(KeepsTheLast)


class ByChoices(Native):
    """Native, whose router lets first choices stay first."""

    session_class = NativeSession.building(FirstChoicesFirst)


class FullWire(Native):
    """Native, whose exchange sends its capacity."""

    session_class = NativeSession.building(CapacityOnTheWire)


class RoundedUp(Native):
    """Native, whose exchange rounds capacities up."""

    session_class = NativeSession.building(RoundedUpOverTensorRanks)


class NoisyInTraining(Router):
    """Adds noise to its logits while it trains, and says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, noise="training")

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        return logits_TE + torch.randn_like(logits_TE) if self.training else logits_TE


class Noisy(Native):
    """Native, whose router is noisy."""

    session_class = NativeSession.building(NoisyInTraining)


class RanksByScore(Router):
    """By weight the slots of the highest scores stay, whatever the weights are divided by; it says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, drop_by="scores")

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        self.scores_TK = scores_TE.detach().gather(1, ids_TK)
        return super()._weights(scores_TE, ids_TK)

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        return super()._keep(ids_TK, self.scores_TK, room)


class RoundsCapacitiesDown(Router):
    """A capacity that is no whole number is rounded down; it says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, capacity_rounding="down")

    def _capacity(self, tokens: int) -> int:
        assert self.config.capacity.factor is not None
        mean = Fraction(self.config.capacity.factor) * self.config.top_k * tokens / self.config.experts
        return max(self.config.capacity.minimum, math.floor(mean))


class NormalisesOverTheKept(Router):
    """Weights are divided by the sum of those that were kept, as in DeepSpeed; it says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, normalised_over="kept")

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = super()._drop(ids_TK, weights_TK)
        if not self.config.routing.normalise:
            return ids_TK, weights_TK
        sum_T1 = weights_TK.sum(1, keepdim=True)
        return ids_TK, weights_TK / sum_T1.masked_fill(sum_T1 == 0, 1.0) * self.config.routing.scale


class ByScores(Native):
    """Native, whose router ranks by score."""

    session_class = NativeSession.building(RanksByScore)


class RoundedDown(Native):
    """Native, whose router rounds capacities down."""

    session_class = NativeSession.building(RoundsCapacitiesDown)


class OverTheKept(Native):
    """Native, whose router normalises over the kept."""

    session_class = NativeSession.building(NormalisesOverTheKept)


class WeighsInFloat32(Router):
    """Scores are float32 whatever the tokens are, as in most layers; it says so."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, dtype=torch.float32)

    def _logits(self, x_TD: Tensor) -> Tensor:
        return super()._logits(x_TD).float()


class InFloat32(Native):
    """Native, whose router computes in float32."""

    session_class = NativeSession.building(WeighsInFloat32)
