"""The corpus of virtual ranks: worlds of 8 to 512, and workloads small enough for a judge who is one process.

These sizes are for what changes with the number of ranks: indices of ranks, experts and rows, offsets, counts. What
the usual corpus tries on a few ranks (dtypes, top-1, odd sizes) is not tried again. Every rank has few tokens, but
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
    """Everything goes to the last K + 1 experts, from all ranks: hundreds of rows for each."""
    return draw.choose(T, config, generator, range(config.experts - config.top_k - 1, config.experts))


def layouts() -> tuple[Layout, ...]:
    """The layouts of virtual ranks, smallest first: all of the world for ep, and ep together with the other axes.

    Of 64 and of 256 ranks there are all foldings of tp, ep and etp that the full profile has on few.
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
    """Whether a variant runs on a layout: the first on all of them."""
    return first_variant or layout.world <= _WIDEST_OF_ALL or not wide(layout)


def wide(layout: Layout) -> bool:
    """Whether variants other than the first meet the workloads of `sparse` alone on a layout.

    An exchange that brings every token to every rank of ep * etp holds the square of their number in rows. Which
    variants do so is not known, so that all get few tokens there.
    """
    return layout.ep * layout.etp > _WIDEST_ALL_GATHER


def recipes(layout: Layout) -> tuple[tuple[Recipe, ...], tuple[Recipe, ...]]:
    """The recipes for a layout, with the probe and with the backend's own experts.

    A rank holds two experts, one where there are 512; there are no fewer than 8. The probe needs a column for each, own
    experts do not.
    """
    E = max(8, layout.ep * (2 if layout.ep < 512 else 1))
    probe: dict[str, Any] = {"experts": E, "hidden": max(E, 32)}
    own: dict[str, Any] = {"experts": E, "hidden": 32, "ffn": 16}
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
            Recipe("own-many-ranks-uneven", anywhere, uneven, own),
            Recipe("own-many-ranks-last-experts", last_experts, _SOME_WITHOUT, own),
        ),
    )


def sparse_recipes(layout: Layout) -> tuple[tuple[Recipe, ...], tuple[Recipe, ...]]:
    """The recipes for all variants on a wide layout: an expert for each rank, and half as many tokens as ranks."""
    probe: dict[str, Any] = {"experts": layout.ep, "hidden": max(layout.ep, 32)}
    own: dict[str, Any] = {"experts": layout.ep, "hidden": 32, "ffn": 16}
    return (
        (
            Recipe("few-tokens-of-many-ranks-in-flight", anywhere, _FEWEST, probe, schedule="F0 F1 B1 B0"),
            Recipe("few-tokens-of-many-ranks-padded", anywhere, _FEWEST, {**probe, **_PADDED, "padding.alignment": 2}),
        ),
        (Recipe("own-few-tokens-of-many-ranks", anywhere, _FEWEST, own),),
    )


@cache
def names() -> frozenset[str]:
    """Return the names of the workloads of all layouts."""
    made = (*recipes(layouts()[0]), *sparse_recipes(layouts()[0]))
    return frozenset(recipe.name for some in made for recipe in some)


def corpus(variant: str, layout: Layout) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout: with the probe, then with the backend's own experts."""
    yield from _drawn(recipes(layout), variant, layout)


def sparse(variant: str, layout: Layout) -> Iterator[Workload]:
    """Yield what every variant meets on a wide layout; nothing on others, and on those that only the first runs on."""
    if wide(layout) and layout.world <= _WIDEST_OF_ALL:
        yield from _drawn(sparse_recipes(layout), variant, layout)


def _drawn(recipes: tuple[tuple[Recipe, ...], tuple[Recipe, ...]], variant: str, layout: Layout) -> Iterator[Workload]:
    probe, own = recipes
    for recipe in probe:
        yield replace(exchange_workload(recipe, ExchangeStep(), variant, layout), shows=_MANY_RANKS)
    for recipe in own:
        yield replace(exchange_workload(recipe, ExpertsStep(), variant, layout), shows=_MANY_RANKS)
