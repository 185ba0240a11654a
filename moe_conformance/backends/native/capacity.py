"""Capacity: how many slots of this rank's tokens an expert takes, and which of them.

T tokens, K slots, E experts, P slots of all tokens that are not empty.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.contract import Config


def check(config: Config) -> None:
    """Raise `CannotBuild` where there is no such capacity."""
    factor = config.capacity_factor
    if factor is not None and not 0 <= factor < math.inf:
        raise CannotBuild(f"capacity_factor = {factor}: it must be a finite number of at least 0")
    if config.min_capacity < 0:
        raise CannotBuild(f"min_capacity = {config.min_capacity}: it must be at least 0")


def of_rank(config: Config, tokens: int) -> int:
    """Return the capacity of a rank with that many tokens, exactly: the factor is taken for the fraction it is."""
    assert config.capacity_factor is not None  # asked only where there is one
    mean = Fraction(config.capacity_factor) * config.top_k * tokens / config.experts
    return max(config.min_capacity, math.ceil(mean))


def keep(ids_TK: Tensor, experts: int, room: int, worth_TK: Tensor | None) -> Tensor:
    """Say which slots stay, bool (T, K): of every expert the `room` of highest worth, and among equals the earliest.

    Without a worth the earliest stay, in the order of tokens. Empty slots stay empty.
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
