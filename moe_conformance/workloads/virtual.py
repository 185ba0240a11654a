"""The layouts and workloads of virtual ranks: worlds of 8 to 512, with workloads that one process can judge.

They test what depends on the number of ranks: indices of ranks, experts and rows, offsets, counts. What the usual
workloads test on a few ranks (dtypes, top-1, odd sizes) is not repeated. Every rank has few tokens, but
ranks with none and experts with hundreds of rows are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.routes import anywhere, dropped
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload

WORLDS = (8, 64, 256, 512)

# Tokens of rank r: the entry r modulo the length, which is odd so that ranks differ that are powers of two apart.
_UNEVEN, _FEW = (2, 1, 3, 2, 4), (1, 2, 1, 1, 3)
_SOME_WITHOUT = (2, 0, 1, 0, 0, 3, 0)
_PADDED = {"padding.tokens": "group_max", "padding.alignment": 4}
_FEWEST = (1, 0, 1, 0, 0, 2, 0)
_WIDEST_ALL_GATHER = 64  # ranks of ep * etp
_WIDEST_OF_ALL = 256  # ranks of a world
_MANY_RANKS = frozenset({"many ranks"})


def last_experts(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route all tokens of all ranks to the last K + 1 experts, which get hundreds of rows."""
    return draw.choose(T, config, generator, range(config.experts - config.top_k - 1, config.experts))


def layouts() -> tuple[Layout, ...]:
    """Return the layouts of virtual ranks, smallest first: ep over the whole world, and ep with the other axes.

    For 64 and 256 ranks there are all foldings of tp, ep and etp that the full profile has on few ranks.
    """
    return (
        Layout(8, ep=8),
        Layout(8, ep=4),
        Layout(8, tp=2, ep=4),
        Layout(8, ep=4, etp=2),
        Layout(64, ep=64),
        Layout(64),
        Layout(64, ep=8),
        Layout(64, tp=8),
        Layout(64, etp=8),
        Layout(64, tp=4, etp=4),
        Layout(64, tp=8, ep=16),
        Layout(64, tp=8, ep=64),
        Layout(64, ep=16, etp=2),
        Layout(64, tp=2, ep=16, etp=4),
        Layout(64, tp=8, ep=8, etp=4),
        Layout(64, tp=2, cp=2, pp=2, ep=8, etp=2),
        Layout(256, ep=256),
        Layout(256),
        Layout(256, ep=32),
        Layout(256, tp=8),
        Layout(256, etp=8),
        Layout(256, tp=4, etp=4),
        Layout(256, tp=8, ep=32),
        Layout(256, ep=32, etp=2),
        Layout(256, tp=4, ep=64, etp=2),
        Layout(256, tp=8, ep=16, etp=4),
        Layout(256, tp=2, cp=2, pp=2, ep=16, etp=2),
        Layout(512, ep=512),
        Layout(512, ep=64),
        Layout(512, tp=2, ep=256, etp=2),
    )


def suits(layout: Layout, first_variant: bool) -> bool:
    """Return whether a variant runs on a layout; the first variant runs on all."""
    return first_variant or layout.world <= _WIDEST_OF_ALL or not wide(layout)


def wide(layout: Layout) -> bool:
    """Return whether variants other than the first run the workloads of `sparse` only on a layout.

    In an exchange that gathers every token on every rank of ep * etp, the number of rows grows with the square of ep *
    etp. Which variants do so is not known, so all of them get few tokens there.
    """
    return layout.ep * layout.etp > _WIDEST_ALL_GATHER


def recipes(layout: Layout) -> tuple[tuple[Recipe, ...], tuple[Recipe, ...]]:
    """Return the recipes for a layout: those with the probe expert, and those with the backend's experts.

    A rank holds two experts, or one if ep is 512; there are at least 8. The probe expert needs a column per expert, the
    backend's experts do not.
    """
    E = max(8, layout.ep * (2 if layout.ep < 512 else 1))
    probe: dict[str, Any] = {"experts": E, "hidden": max(E, 32)}
    real: dict[str, Any] = {"experts": E, "hidden": 32, "ffn": 16}
    uneven = _UNEVEN if layout.world <= 64 else _FEW
    return (
        (
            Recipe("many-ranks-uneven", anywhere, uneven, probe),
            Recipe("many-ranks-some-without-tokens", dropped, _SOME_WITHOUT, probe),
            Recipe("many-ranks-last-experts", last_experts, uneven, probe),
            Recipe("many-ranks-in-flight", anywhere, uneven, probe, schedule="F0 F1 B1 B0"),
            Recipe("many-ranks-padded", anywhere, _SOME_WITHOUT, {**probe, **_PADDED}),
        ),
        (
            Recipe("own-many-ranks-uneven", anywhere, uneven, real),
            Recipe("own-many-ranks-last-experts", last_experts, _SOME_WITHOUT, real),
        ),
    )


def sparse_recipes(layout: Layout) -> tuple[tuple[Recipe, ...], tuple[Recipe, ...]]:
    """Return the recipes for all variants on a wide layout: one expert per rank, and half as many tokens as ranks."""
    probe: dict[str, Any] = {"experts": layout.ep, "hidden": max(layout.ep, 32)}
    real: dict[str, Any] = {"experts": layout.ep, "hidden": 32, "ffn": 16}
    return (
        (
            Recipe("few-tokens-of-many-ranks-in-flight", anywhere, _FEWEST, probe, schedule="F0 F1 B1 B0"),
            Recipe("few-tokens-of-many-ranks-padded", anywhere, _FEWEST, {**probe, **_PADDED, "padding.alignment": 2}),
        ),
        (Recipe("own-few-tokens-of-many-ranks", anywhere, _FEWEST, real),),
    )


@cache
def names() -> frozenset[str]:
    """Return the names of the workloads of all layouts."""
    made = (*recipes(layouts()[0]), *sparse_recipes(layouts()[0]))
    return frozenset(recipe.name for some in made for recipe in some)


def corpus(variant: str, layout: Layout) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout: with the probe expert, then with the backend's experts."""
    yield from _drawn(recipes(layout), variant, layout)


def sparse(variant: str, layout: Layout) -> Iterator[Workload]:
    """Yield the workloads of all variants on a wide layout; none elsewhere, or where only the first variant runs."""
    if wide(layout) and layout.world <= _WIDEST_OF_ALL:
        yield from _drawn(sparse_recipes(layout), variant, layout)


def _drawn(recipes: tuple[tuple[Recipe, ...], tuple[Recipe, ...]], variant: str, layout: Layout) -> Iterator[Workload]:
    probe, real = recipes
    for recipe in probe:
        yield replace(exchange_workload(recipe, ExchangeStep(), variant, layout), shows=_MANY_RANKS)
    for recipe in real:
        yield replace(exchange_workload(recipe, ExpertsStep(), variant, layout), shows=_MANY_RANKS)
