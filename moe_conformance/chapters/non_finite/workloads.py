"""Exchanges with NaN and infinity in some tokens, or in some upstream gradients.

With several ranks rank 0 has none of them, so that any that reach it came through the exchange.
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
    where: Where  # dropped: tokens and upstream gradients of a token without slots
    run: ExchangeStep | ExpertsStep


def _spoilt(
    where: Where,
    name: str,
    route: routes.Route,
    tokens: tuple[int, ...],
    config: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[_Spoilt, ...]:
    """Return the workload with the suite's experts, and with the backend's, these also in float16 (full profile)."""
    # In bfloat16, in which the experts of some libraries always compute.
    half = Recipe(f"own-spoilt-{name}", route, tokens, {"dtype": torch.bfloat16, **config})
    float16 = replace(half, name=f"{half.name}-float16", config={**half.config, "dtype": torch.float16}, profile="full")
    return (
        _Spoilt(Recipe(f"spoilt-{name}", route, tokens, dict(config)), where, ExchangeStep(tokens="not finite")),
        _Spoilt(half, where, ExpertsStep(tokens="not finite")),
        _Spoilt(float16, where, ExpertsStep(tokens="not finite")),
    )


_TO_CAPACITY = {"capacity.padded": True}
_PADDED = {"padding.tokens": "group_max", "padding.alignment": 8}
_PAIRS = (
    _spoilt("tokens", "tokens-even", routes.anywhere, recipes.EVEN),
    _spoilt("tokens", "tokens-uneven", routes.anywhere, recipes.UNEVEN),
    _spoilt("upstream", "upstream-even", routes.anywhere, recipes.EVEN),
    _spoilt("dropped", "dropped-even", routes.dropped, recipes.EVEN),
    # Where experts have a fixed number of rows, a product with a one-hot map may move tokens there.
    _spoilt("tokens", "tokens-to-capacity-even", routes.anywhere, recipes.EVEN, _TO_CAPACITY),
    _spoilt("upstream", "upstream-to-capacity-even", routes.anywhere, recipes.EVEN, _TO_CAPACITY),
    _spoilt("tokens", "tokens-padded-uneven", routes.anywhere, recipes.UNEVEN, _PADDED),
)
_ALL = tuple(spoilt for group in _PAIRS for spoilt in group)
NAMES = tuple(spoilt.recipe.name for spoilt in _ALL)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
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
    """Return the batch with one token of NaN, and infinities in one column of two others.

    These tokens go to experts with even ids. If `where` is "dropped", only the first token, which has no slot, and the
    weights of empty slots are spoilt.
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
