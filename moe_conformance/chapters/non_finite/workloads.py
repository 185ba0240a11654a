"""Tokens that are no numbers: NaN and infinity in some tokens, or in the gradients that come back to some.

Rank 0 has none of them where there are other ranks: whatever reaches it came through the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import recipes
from moe_conformance.workloads.chapter import SMALL, Chapter
from moe_conformance.workloads.recipes import Recipe
from moe_conformance.workloads.records import routes
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Workload
from moe_conformance.workloads.selection.profiles import Profile

Where = Literal["tokens", "upstream", "dropped"]


@dataclass(frozen=True)
class _Spoilt:
    recipe: Recipe
    where: Where  # dropped: a token without a slot, in both
    run: ExchangeStep | ExpertsStep


def _spoilt(
    where: Where,
    name: str,
    route: routes.Route,
    tokens: tuple[int, ...],
    config: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[_Spoilt, ...]:
    """Return the workload with the suite's experts, and with the backend's own; in float16 in the full profile."""
    # In bfloat16: some libraries' experts compute in it whatever the tokens are.
    own = Recipe(f"own-spoilt-{name}", route, tokens, {"dtype": torch.bfloat16, **config})
    float16 = replace(own, name=f"{own.name}-float16", config={**own.config, "dtype": torch.float16}, profile="full")
    return (
        _Spoilt(Recipe(f"spoilt-{name}", route, tokens, dict(config)), where, ExchangeStep(tokens="not finite")),
        _Spoilt(own, where, ExpertsStep(tokens="not finite")),
        _Spoilt(float16, where, ExpertsStep(tokens="not finite")),
    )


_TO_CAPACITY = {"capacity.padded": True}
_PADDED = {"padding.tokens": "group_max", "padding.alignment": 8}
_PAIRS = (
    _spoilt("tokens", "tokens-even", routes.anywhere, recipes.EVEN),
    _spoilt("tokens", "tokens-uneven", routes.anywhere, recipes.UNEVEN),
    _spoilt("upstream", "upstream-even", routes.anywhere, recipes.EVEN),
    _spoilt("dropped", "dropped-even", routes.dropped, recipes.EVEN),
    # Where rows have places of their own, a product with a map of ones and zeros may take them there.
    _spoilt("tokens", "tokens-to-capacity-even", routes.anywhere, recipes.EVEN, _TO_CAPACITY),
    _spoilt("upstream", "upstream-to-capacity-even", routes.anywhere, recipes.EVEN, _TO_CAPACITY),
    _spoilt("tokens", "tokens-padded-uneven", routes.anywhere, recipes.UNEVEN, _PADDED),
)
_ALL = tuple(each for pair in _PAIRS for each in pair)
NAMES = tuple(each.recipe.name for each in _ALL)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield them all."""
    for spoilt in _ALL:
        if profile == "quick" and spoilt.recipe.profile == "full":
            continue
        workload = recipes.exchange_workload(spoilt.recipe, spoilt.run, variant, layout)
        E = workload.config.experts
        batches = tuple(
            tuple(_spoil(b, spoilt.where, E) if rank or layout.world == 1 else b for rank, b in enumerate(ranks))
            for ranks in workload.batches
        )
        yield replace(workload, batches=batches)


def _spoil(batch: Batch, where: Where, experts: int) -> Batch:
    """Return the batch with one token that is NaN all over, and with infinities in one column of two others.

    They go to experts of even ids. Where tokens are dropped only the first, which has no slot, is spoilt, and what
    empty slots have for a weight.
    """
    x_TD, upstream_TD, ids_TK = batch.x_TD.clone(), batch.upstream.clone(), batch.ids_TK.clone()
    if where == "dropped":
        x_TD[0], upstream_TD[0] = torch.nan, torch.nan
        batch = replace(batch, weights_TK=batch.weights_TK.masked_fill(ids_TK < 0, torch.nan))
    else:
        spoilt_TD = x_TD if where == "tokens" else upstream_TD
        spoilt_TD[1] = torch.nan
        spoilt_TD[2, 5], spoilt_TD[3, -3] = torch.inf, -torch.inf
        for t in (1, 2, 3):
            ids_TK[t] = (2 * t + 2 * torch.arange(ids_TK.shape[1])) % experts
    return replace(batch, x_TD=x_TD, upstream=upstream_TD, ids_TK=ids_TK)


CHAPTERS = (
    Chapter((ExchangeStep(tokens="not finite"), ExpertsStep(tokens="not finite")), NAMES, draw, "every", SMALL),
)
