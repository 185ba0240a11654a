"""Exchanges of the ids that a router selects, with forced routing in the config of one of them or of both.

An exchange may rely on round-robin routing. In most of these a rank holds K experts, so that all slots of a token of a
round robin may go to one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch, Drawn, Workload
from moe_conformance.workloads.selection.profiles import Profile

Tokens = tuple[tuple[int, ...], ...]
_SOME: Tokens = ((7, 4, 5, 6), (4, 6, 3, 5))
_NONE: Tokens = ((9, 0, 1, 4), (0, 0, 0, 0), (2, 6, 4, 0))  # rank r has tokens[m][r modulo 4] in microbatch m


@dataclass(frozen=True)
class _Routed:
    """One workload: whose routing is forced, by which strategy, and the sizes."""

    forced: Literal["both forced", "router forced", "exchange forced"]
    strategy: str
    top_k: int = 2
    held: int = 2  # experts of a rank of ep
    tokens: Tokens = _SOME


_RECIPES: Mapping[str, _Routed] = {
    "routed-round-robin": _Routed("both forced", "round_robin", tokens=_NONE),
    "routed-hot-rank": _Routed("both forced", "worst_rank", top_k=3),
    "routed-round-robin-router-alone": _Routed("router forced", "round_robin"),
    "routed-random-router-alone": _Routed("router forced", "random", held=4),
    "routed-round-robin-exchange-alone": _Routed("exchange forced", "round_robin", tokens=_SOME * 2),
}


def routed(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads on layouts with ep > 1."""
    del profile
    if layout.ep > 1:
        for name, recipe in _RECIPES.items():
            yield _workload(name, recipe, variant, layout)


def _workload(name: str, recipe: _Routed, variant: str, layout: Layout) -> Workload:
    options = {"experts": recipe.held * layout.ep, "top_k": recipe.top_k, "routing.forced": ((recipe.strategy, None),)}
    config = Config(variant=variant).changed(options)
    tokens = tuple(tuple(of[rank % len(of)] for rank in range(layout.world)) for of in recipe.tokens)

    def batch(m: int, rank: int) -> Batch:
        """Return tokens without ids, which the router selects."""
        none_TK = torch.full((tokens[m][rank], config.top_k), -1)
        return draw.probe_batch(rank, m, none_TK, config, draw.generator(name, layout.name, m, rank))

    forwards, backwards = (" ".join(f"{item}{m}" for m in range(len(tokens))) for item in "FB")
    parameters = draw.router_parameters(config, draw.generator(name, layout.name, "router"), bias=0.0, twins=False)
    run = ExchangeStep(routed=recipe.forced)
    return Workload(name, run, config, layout, Drawn(tokens, batch), f"{forwards} {backwards}", parameters)


CHAPTERS = (
    Chapter(
        tuple(ExchangeStep(routed=forced) for forced in ("both forced", "router forced", "exchange forced")),
        tuple(_RECIPES),
        routed,
        quick=(EP2, EP2_ETP2),
    ),
)
