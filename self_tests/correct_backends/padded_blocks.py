"""Rows of every expert are padded by zeros to a multiple of 128, as grouped products need; an empty one to 128."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Claims, Config, Delivery, Routing
from self_tests.correct_backends.small_parts import (
    AdaptedExperts,
    SmallBackend,
    SmallSession,
    SwiGLU,
    all_to_all,
    share,
    weighted_sum,
)

BLOCK = 128


class PaddedExchange:
    """Received rows are written to their places in a buffer of zeros, and read from there."""

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        self.group, self.experts = group, config.experts
        self.local_experts = tuple(share(config.experts, group))
        self.claims = Claims(multiple=BLOCK)
        self.resolved = {"exchange": f"blocks of {BLOCK} rows over {group.size()} ranks"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_P, (W, N) = routing.ids_TK.flatten(), (self.group.size(), len(self.local_experts))
        slots_S = ids_P.argsort(stable=True)[int((ids_P < 0).sum()) :]
        sent_WN = ids_P[slots_S].bincount(minlength=self.experts).view(W, N)
        received_WN = torch.empty_like(sent_WN)
        dist.all_to_all_single(received_WN, sent_WN, group=self.group)
        sent, received = sent_WN.sum(1).tolist(), received_WN.sum(1).tolist()
        rows_SD = x.reshape(-1, x.shape[-1])[slots_S // routing.ids_TK.shape[1]]
        rows_RD = all_to_all(rows_SD, received, sent, self.group)
        counts_N = received_WN.sum(0)
        padded_N = -(-counts_N.clamp_min(1) // BLOCK) * BLOCK
        begin_N = padded_N.cumsum(0) - padded_N
        # Within an expert the rows of rank 0 come first, then those of rank 1, and so on.
        begin_WN = begin_N + received_WN.cumsum(0) - received_WN
        offset_R = torch.arange(sum(received)) - (
            received_WN.flatten().cumsum(0) - received_WN.flatten()
        ).repeat_interleave(received_WN.flatten())
        place_R = begin_WN.flatten().repeat_interleave(received_WN.flatten()) + offset_R
        rows_PD = rows_RD.new_zeros(int(padded_N.sum()), rows_RD.shape[1]).index_copy(0, place_R, rows_RD)
        return Delivery.grouped(rows_PD, padded_N), (x.shape, routing.weights_TK, slots_S, place_R, received, sent)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shape, weights_TK, slots_S, place_R, received, sent = handle
        out_SD = all_to_all(rows[place_R], sent, received, self.group)
        return weighted_sum(out_SD, slots_S, weights_TK).view(shape)


class PaddedExperts(SwiGLU):
    """A loop in place of the grouped product: it takes whole blocks."""

    def forward(self, rows_RD: Tensor, counts_N: Tensor) -> Tensor:
        pieces = rows_RD.split(counts_N.tolist())
        return torch.cat([self.one(n, piece) for n, piece in enumerate(pieces)])


class AdaptedPadded(AdaptedExperts):
    """The experts, given counts of rows."""

    def __call__(self, delivery: Delivery) -> Tensor:
        out_RD: Tensor = self.module(delivery.rows_RD, delivery.counts_N)
        return out_RD


class PaddedSession(SmallSession):
    """One topology on one rank."""

    def build_exchange(self, config: Config) -> PaddedExchange:
        return PaddedExchange(config, self.ep)

    def build_experts(self, config: Config) -> AdaptedExperts:
        return AdaptedPadded(PaddedExperts(share(config.experts, self.ep), config))


class Padded(SmallBackend):
    """What `--backend self_tests.correct_backends.padded_blocks:Padded` names."""

    name, session = "padded-blocks", PaddedSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
