"""Hypothesis strategies: any batch that a backend's declared limits allow.

Drawn on the driver, so ranks cannot disagree. Smaller is simpler: shrinking leads to one microbatch, few tokens,
expert 0, float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from moe_conformance.contract import Config, Limit
from moe_conformance.topology import Layout
from moe_conformance.workloads import draw
from moe_conformance.workloads.features import broken
from moe_conformance.workloads.records import Batch, Workload

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_SCHEDULES = {1: ("F0 B0",), 2: ("F0 B0", "F0 F1 B0 B1", "F0 F1 B1 B0", "F0 B0 F1 B1")}


@dataclass(frozen=True)
class Freedom:
    """What a batch may do, read from the limits of a variant."""

    uneven: bool
    zero: bool
    dropped: bool
    duplicates: bool
    schedules: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def under(cls, limits: Sequence[Limit]) -> Freedom:
        """Return what all the limits together allow."""

        def allows(on: str, value: Any) -> bool:
            return all(value in limit.allowed for limit in limits if limit.on == on)

        return cls(
            uneven=allows("uneven_tokens", True),
            zero=allows("zero_tokens", True),
            dropped=allows("dropped_slots", True),
            duplicates=allows("duplicate_experts", True),
            schedules=_SCHEDULES[2 if allows("in_flight", 2) else 1] + ("F0 B0 F1 B1",),
            dtypes=tuple(dtype for dtype in _DTYPES if allows("dtype", dtype)),
        )


@st.composite
def probe_workloads(
    draw_from: st.DrawFn, variant: str, layout: Layout, limits: Sequence[Limit], device: str
) -> Workload:
    """Draw one probe workload within the limits: sizes, routing with drops and duplicates, dtype and schedule."""
    freedom = Freedom.under(limits)
    held = draw_from(st.integers(1, 4))
    E = held * layout.ep
    K = draw_from(st.integers(1, min(E, 4)))
    D = draw_from(st.sampled_from([32, 33, 48]))
    config = Config(variant, E, K, D, dtype=draw_from(st.sampled_from(freedom.dtypes)))
    schedule = draw_from(st.sampled_from(freedom.schedules))
    microbatches = 2 if "1" in schedule else 1
    batches = tuple(
        _microbatch(draw_from, microbatch, config, layout, freedom) for microbatch in range(microbatches)
    )
    workload = Workload("drawn", "probe", config, layout, batches, schedule)
    if limit := broken(limits, workload, device):
        raise AssertionError(f"the strategy drew what {limit} forbids")  # a fault of ours, not of the backend
    return workload


def _microbatch(
    draw_from: st.DrawFn, microbatch: int, config: Config, layout: Layout, freedom: Freedom
) -> tuple[Batch, ...]:
    least = 0 if freedom.zero else 1
    if freedom.uneven:
        tokens = draw_from(st.lists(st.integers(least, 6), min_size=layout.world, max_size=layout.world))
    else:
        tokens = [draw_from(st.integers(max(least, 1), 6))] * layout.world
    return tuple(_batch(draw_from, rank, T, microbatch, config, freedom) for rank, T in enumerate(tokens))


def _batch(
    draw_from: st.DrawFn, rank: int, tokens: int, microbatch: int, config: Config, freedom: Freedom
) -> Batch:
    E, K = config.experts, config.top_k
    if freedom.duplicates:
        row = st.lists(st.integers(0, E - 1), min_size=K, max_size=K)
    else:
        row = st.permutations(range(E)).map(lambda order: list(order[:K]))
    if freedom.dropped:
        kept = st.lists(st.booleans(), min_size=K, max_size=K)
        row = st.tuples(row, kept).map(lambda pair: [e if keep else -1 for e, keep in zip(*pair, strict=True)])
    ids = draw_from(st.lists(row, min_size=tokens, max_size=tokens))
    ids_TK = torch.tensor(ids, dtype=torch.int64).reshape(tokens, K)
    seed = draw_from(st.integers(0, 2**16))
    generator = draw.generator(seed, rank, microbatch)
    return draw.probe_batch(rank, microbatch, ids_TK, config, generator, odd=draw_from(st.booleans()))
