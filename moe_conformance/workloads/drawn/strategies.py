"""Hypothesis strategies for all batches of an exchange that a backend's limits allow; see also router_strategies.py.

Batches are drawn on the driver, so that ranks cannot disagree. Shrinking leads to one microbatch, few tokens, expert 0,
float32, plain weights. The set of experts that occur is drawn before the ids, so that routing all tokens to one expert
is as likely as routing them to all experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.contract import Config, Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.drawn.freedom import Freedom
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.schedule import microbatches
from moe_conformance.workloads.records.workload import Batch, Workload

MOST_SLOTS, MOST_HELD = 4, 4

Weights = Literal["plain", "tied", "odd", "tiny"]

_MOST_NAMED = 2  # slots of a token with the same expert, if duplicates are drawn
_DROPS = st.lists(st.booleans(), min_size=MOST_SLOTS, max_size=MOST_SLOTS)
_ONE_AT_A_TIME = ("F0 B0", "F0 B0 F1 B1")
_TWO_IN_FLIGHT = ("F0 F1 B0 B1", "F0 F1 B1 B0")


@dataclass(frozen=True)
class _Manner:
    """The properties that all ranks of a drawn workload share."""

    places: st.SearchStrategy[list[int]]  # a token's slots: indices into the pool
    pool: tuple[int, ...]  # the experts that occur
    repeats: bool  # an expert may occur twice in a token, not more: sums over slots would be inexact in bfloat16
    drops: bool
    weights: Weights
    seed: int


@st.composite
def probe_workloads(
    draw_from: st.DrawFn, variant: str, layout: Layout, limits: Sequence[Limit], device: str
) -> Workload:
    """Draw one probe workload within the limits: sizes, routing with drops and duplicates, dtype and schedule."""
    freedom = Freedom.under(limits, layout, device)
    E = draw_from(st.integers(1, MOST_HELD)) * layout.ep
    K = draw_from(st.integers(1, min(E, MOST_SLOTS)))
    D = draw_from(st.sampled_from([32, 33, 48]))
    config = Config(variant, E, K, D, dtype=draw_from(st.sampled_from(freedom.dtypes)))
    schedule = draw_from(schedules(freedom))
    manner = draw_from(_manners(config, freedom))
    batches = tuple(
        tuple(_batch(draw_from, m, rank, T, config, manner) for rank, T in enumerate(draw_from(token_counts(freedom))))
        for m in range(microbatches(schedule))
    )
    workload = Workload("drawn", ExchangeStep(), config, layout, batches, schedule)
    require_allowed(workload, limits, device)
    return workload


def schedules(freedom: Freedom) -> st.SearchStrategy[str]:
    """Return a strategy for schedules of one microbatch or two."""
    return st.sampled_from(_ONE_AT_A_TIME + _TWO_IN_FLIGHT * freedom.two_in_flight)


def token_counts(freedom: Freedom) -> st.SearchStrategy[list[int]]:
    """Return a strategy for the numbers of tokens of all ranks in one microbatch."""
    world = freedom.layout.world
    some = st.integers(0, len(freedom.tokens) - 1).map(lambda place: freedom.tokens[place])
    return st.lists(some, min_size=world, max_size=world) if freedom.uneven else some.map(lambda T: [T] * world)


def weighing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the smallest dtype in which weights may be multiplied: that of the tokens, or float32 if that is float64.

    Routers commonly return weights in float32, whatever the dtype of the tokens.
    """
    return torch.float32 if dtype == torch.float64 else dtype


def require_allowed(workload: Workload, limits: Sequence[Limit], device: str) -> None:
    """Raise AssertionError, a fault of the suite and not of the backend, if a drawn workload breaks a limit."""
    if limit := broken(limits, workload, device):
        raise AssertionError(f"the strategy drew what {limit} forbids")


@st.composite
def _manners(draw_from: st.DrawFn, config: Config, freedom: Freedom) -> _Manner:
    E, K = config.experts, config.top_k
    repeats = freedom.duplicates and K > 1 and draw_from(st.booleans())
    named = max(draw_from(st.integers(1, E)), -(-K // _MOST_NAMED) if repeats else K)
    most = MOST_HELD * freedom.layout.ep
    order = draw_from(st.permutations(range(most)))
    styles: list[Weights] = ["plain", "tied"]
    if freedom.odd_weights:
        styles.append("odd")
    if freedom.subnormal_in(config.dtype):
        styles.append("tiny")
    return _Manner(
        places=st.lists(st.integers(0, most - 1), min_size=MOST_SLOTS, max_size=MOST_SLOTS),
        pool=tuple(expert for expert in order if expert < E)[:named],
        repeats=repeats,
        drops=freedom.dropped and draw_from(st.booleans()),
        weights=draw_from(st.sampled_from(styles)),
        seed=draw_from(st.integers(0, 2**16)),
    )


def _batch(draw_from: st.DrawFn, m: int, rank: int, tokens: int, config: Config, manner: _Manner) -> Batch:
    ids_TK = torch.tensor([_slots(draw_from, config, manner) for _ in range(tokens)], dtype=torch.int64)
    ids_TK = ids_TK.reshape(tokens, config.top_k)
    generator = draw.generator(manner.seed, rank, m)
    batch = draw.probe_batch(rank, m, ids_TK, config, generator, odd=manner.weights == "odd")
    return replace(batch, weights_TK=_restyled(batch.weights_TK, manner.weights, config.dtype))


def _slots(draw_from: st.DrawFn, config: Config, manner: _Manner) -> list[int]:
    """Draw the expert ids of one token.

    The number of draws depends on nothing that may shrink, since shrinking would stall otherwise.
    """
    ids: list[int] = []
    for place in draw_from(manner.places)[: config.top_k]:
        most = _MOST_NAMED if manner.repeats else 1
        free = [expert for expert in manner.pool if ids.count(expert) < most]
        ids.append(free[place % len(free)])
    if not manner.drops:
        return ids
    return [-1 if drop else expert for expert, drop in zip(ids, draw_from(_DROPS), strict=False)]


def _restyled(weights_TK: Tensor, style: Weights, dtype: torch.dtype) -> Tensor:
    """Return weights in a style: equal within a token ("tied"), subnormal ("tiny"), or unchanged.

    Weights are multiples of 1/16. Subnormal ones leave three bits below them, one for the least gain and two for
    upstream gradients, so that every product is still exact.
    """
    if style == "tied":
        return weights_TK[:, :1].repeat(1, weights_TK.shape[1])
    if style == "tiny":
        weighing = torch.finfo(weighing_dtype(dtype))
        return weights_TK * 16 * (8 * weighing.tiny * weighing.eps)
    return weights_TK
