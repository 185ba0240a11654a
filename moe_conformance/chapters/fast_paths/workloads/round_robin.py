"""Exchanges with round-robin routing, which a backend may compute without ids where every token goes to one rank.

The config says that routing is forced, and the ids agree: slot k of token t goes to expert (o + t K + k) mod E, where o
depends on the source rank. The number of tokens may be a multiple of ep or not; a rank may hold K experts or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch, Drawn, Workload
from moe_conformance.workloads.selection.profiles import Profile

DEALT = ExchangeStep(option="round robin")


@dataclass(frozen=True)
class Dealt:
    """The sizes of one workload; rank r has the entries r modulo the length."""

    held: int  # experts of a rank of ep
    top_k: int
    tokens: Sequence[int] = (8,)
    starts: Sequence[int] = (0,)  # o
    config: dict[str, Any] = field(default_factory=dict)
    schedule: str = "F0 B0"
    profile: Profile = "quick"
    turns: Sequence[Sequence[int]] = ()  # the tokens of every microbatch, in place of `tokens`


DEALS = {
    "dealt-whole-even": Dealt(3, 3, (7,)),
    "dealt-whole-rank-without-tokens": Dealt(2, 2, (9, 0, 1, 4), (2, 0, 4, 6), schedule="F0 F1 B0 B1"),
    "dealt-shifted-even": Dealt(2, 2, (8,), (1, 3, 2)),
    # T, K and N divide none of each other, and ranks get 50 and 40 rows: multiples of N, though K is not N.
    "dealt-fewer-slots-even": Dealt(10, 6, (15,)),
    "dealt-more-slots-even": Dealt(2, 3, (7,), (2, 4), profile="full"),
    "dealt-input-weights-even": Dealt(2, 2, config={"weights_applied": "input"}),
}


def starts_elsewhere(workload: Workload) -> bool:
    """Return whether the ids of some rank begin at an expert other than 0."""
    return any(bool(batch.ids_TK[:1, :1].any()) for microbatch in workload.batches for batch in microbatch)


def deals(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the exchanges in which K is at most E, which depends on ep."""
    for name, deal in DEALS.items():
        if (profile == "full" or deal.profile == "quick") and deal.top_k <= deal.held * layout.ep:
            yield dealt_workload(name, deal, variant, layout)


def dealt_workload(name: str, deal: Dealt, variant: str, layout: Layout) -> Workload:
    """Return the exchange of a recipe."""
    options = {"experts": deal.held * layout.ep, "top_k": deal.top_k, "routing.forced": (("round_robin", None),)}
    config = Config(variant=variant).changed({**options, **deal.config})
    microbatches = schedule.microbatches(deal.schedule)
    drawn = [[deal.tokens[(rank + m) % len(deal.tokens)] for rank in range(layout.world)] for m in range(microbatches)]
    turns = (deal.turns or drawn)[:microbatches]
    tokens = tuple(tuple(turn[rank % len(turn)] for rank in range(layout.world)) for turn in turns)

    def batch(microbatch: int, rank: int) -> Batch:
        T, start = tokens[microbatch][rank], deal.starts[rank % len(deal.starts)]
        ids_TK = (start + torch.arange(T * config.top_k)).reshape(T, config.top_k) % config.experts
        generator = draw.generator(name, layout.name, microbatch, rank)
        return draw.probe_batch(rank, microbatch, ids_TK, config, generator)

    return Workload(name, DEALT, config, layout, Drawn(tokens, batch), deal.schedule)


CHAPTERS = (Chapter((DEALT,), tuple(DEALS), deals, quick=(SINGLE, EP2, EP2_ETP2, TP2_EP2)),)
