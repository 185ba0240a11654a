"""Capacity: how many slots of this rank's tokens an expert takes, which of them, and rows that fill up to it.

T tokens, K slots, E experts, D hidden, P slots of all tokens that are not empty, Q places for their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config


def of_rank(config: Config, tokens: int) -> int:
    """Return the capacity of a rank with that many tokens, exactly: the factor is taken for the fraction it is.

    Implements: DROP-01, DROP-02.
    """
    assert config.capacity.factor is not None  # asked only where there is one
    mean = Fraction(config.capacity.factor) * config.top_k * tokens / config.experts
    return max(config.capacity.minimum, math.ceil(mean))


def keep(ids_TK: Tensor, experts: int, room: int, worth_TK: Tensor | None) -> Tensor:
    """Say which slots stay, bool (T, K): of every expert the `room` of highest worth, and among equals the earliest.

    Without a worth the earliest stay, in the order of tokens. Empty slots stay empty.

    Implements: DROP-03, DROP-04, DROP-05, DROP-06.
    """
    held_TK = ids_TK >= 0
    ids_P = ids_TK[held_TK]
    order_P = torch.arange(len(ids_P), device=ids_TK.device)
    if worth_TK is not None:
        order_P = worth_TK[held_TK].argsort(descending=True, stable=True)
    order_P = order_P[ids_P[order_P].argsort(stable=True)]  # by expert, each in the order of worth
    counts_E = torch.bincount(ids_P, minlength=experts)
    first_E = counts_E.cumsum(0) - counts_E
    place_P = torch.arange(len(ids_P), device=ids_TK.device) - first_E[ids_P[order_P]]
    kept_P = torch.zeros_like(ids_P, dtype=torch.bool).index_put((order_P,), place_P < room)
    return torch.zeros_like(held_TK).index_put((held_TK,), kept_P)


def overfull(ids_TK: Tensor, config: Config) -> str:
    """Return which expert has more slots than room up to which its rows are filled, "" if none has."""
    if not config.capacity.padded or config.capacity.factor is None:
        return ""
    room = of_rank(config, len(ids_TK))
    counts_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=config.experts)
    over = (counts_E > room).nonzero().flatten().tolist()
    return f"{int(counts_E[over[0]])} slots for expert {over[0]}, whose capacity is {room}" if over else ""


# ---- rows that fill up ---------------------------------------------------------------------------------------


def lossless(config: Config, counts_E: Tensor, group: dist.ProcessGroup) -> int:
    """Return the capacity that drops nothing on any rank of the group, the same on all of them; collective.

    It is the largest number of rows of one rank for one expert, or the minimum.

    Implements: DROP-08.
    """
    largest = counts_E.max().reshape(1)
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return max(config.capacity.minimum, int(largest))


@dataclass(frozen=True)
class Blocks:
    """Room for equally many rows of every expert, of which the first are filled.

    Implements: DROP-12.
    """

    place_P: Tensor  # of the rows, which lie by expert, among the Q places
    room_E: Tensor

    @classmethod
    def of(cls, counts_E: Tensor, room: int) -> Blocks:
        """Return the blocks for so many rows of every expert.

        Raises:
            ValueError: an expert has more rows than room, because nothing was dropped before.
        """
        over = (counts_E > room).nonzero().flatten().tolist()
        if over:
            raise ValueError(f"{int(counts_E[over[0]])} rows for expert {over[0]}, whose capacity is {room}")
        room_E = torch.full_like(counts_E, room)
        shift_E = (room_E - counts_E).cumsum(0) - (room_E - counts_E)
        row_P = torch.arange(int(counts_E.sum()), device=counts_E.device)
        return cls(row_P + shift_E.repeat_interleave(counts_E), room_E)

    def fill(self, rows_PD: Tensor) -> Tensor:
        """Return rows_QD, zeros in the places that are left."""
        empty_QD = rows_PD.new_zeros(int(self.room_E.sum()), rows_PD.shape[1])
        return empty_QD.index_put((self.place_P,), rows_PD)

    def take(self, rows_QD: Tensor) -> Tensor:
        """Return rows_PD; what stands in the places that are left reaches nothing.

        Implements: EXCH-39, GRAD-09.
        """
        return rows_QD[self.place_P]


def largest_load(ids_TK: Tensor, experts: int, sizes_W: Sequence[int]) -> int:
    """Return the largest number of slots of any rank for any expert, given the gathered slots of all ranks."""
    loads = [torch.bincount(ids_tK[ids_tK >= 0], minlength=experts).max() for ids_tK in ids_TK.split(list(sizes_W))]
    return int(torch.stack(loads).max())
