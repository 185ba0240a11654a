"""Functions that route the tokens of a rank, usual and adversarial: they return ids (T, K), -1 for an empty slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records import draw

Route = Callable[[int, Config, Layout, torch.Generator], Tensor]  # (T, config, layout, generator) -> ids_TK


def anywhere(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route every token to K different experts, with unequal loads."""
    return draw.choose(T, config, generator)


def in_turn(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route slots to experts round robin, see `draw.in_turn`."""
    return draw.in_turn(T, config)


def empty_expert(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route no token of any rank to expert 1."""
    return draw.choose(T, config, generator, [e for e in range(config.experts) if e != 1])


def idle_rank(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route no token to the experts of the last ep coordinate."""
    held = config.experts // layout.ep
    return draw.choose(T, config, generator, range(config.experts - held))


def one_rank(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route all tokens to the experts of the last ep coordinate."""
    held = config.experts // layout.ep
    return draw.choose(T, config, generator, range(config.experts - held, config.experts))


def one_expert(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route all tokens to one expert; K is 1."""
    return torch.full((T, 1), config.experts - 2)


def one_expert_if_odd(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route all tokens to one expert if T is odd, else anywhere; K is 1."""
    return (one_expert if T % 2 else anywhere)(T, config, layout, generator)


def idle_if_odd(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route no token to the last ep coordinate if T is odd, else anywhere."""
    return (idle_rank if T % 2 else anywhere)(T, config, layout, generator)


def dropped(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Leave a third of the slots empty; token 0 has only empty slots, token 1 has none."""
    ids_TK = draw.choose(T, config, generator)
    drop_TK = torch.rand(ids_TK.shape, generator=generator) < 1 / 3
    drop_TK[:1], drop_TK[1:2] = True, False
    return torch.where(drop_TK, -1, ids_TK)


def all_dropped(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Leave every slot empty if T is odd."""
    ids_TK = draw.choose(T, config, generator)
    return torch.full_like(ids_TK, -1) if T % 2 else ids_TK


def duplicates(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Give every other token one expert in two slots."""
    ids_TK = draw.choose(T, config, generator)
    ids_TK[::2, 1] = ids_TK[::2, 0]
    return ids_TK


def one_expert_in_all_slots(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Give every token the same expert in all its slots, on every rank."""
    return torch.zeros(T, config.top_k, dtype=torch.int64)


def one_expert_in_all_slots_if_odd(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Give every token the last expert: in all slots if T is odd, else in one slot."""
    last = config.experts - 1
    if T % 2:
        return torch.full((T, config.top_k), last)
    others = replace(config, top_k=config.top_k - 1)
    return torch.cat([torch.full((T, 1), last), draw.choose(T, others, generator, range(last))], dim=1)


def one_choice(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route all tokens of a rank to the same experts."""
    return draw.choose(1, config, generator).repeat(T, 1)


GAP_EVERY = 8


def gaps(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route sequences of up to 8 tokens in 8 rows, the other rows being padding; a single sequence is all padding."""
    ids_TK = draw.choose(T, config, generator)
    for first in range(0, T, GAP_EVERY):
        length = 0 if T <= GAP_EVERY else int(torch.randint(0, GAP_EVERY + 1, (), generator=generator))
        ids_TK[first + length : first + GAP_EVERY] = -1
    return ids_TK
