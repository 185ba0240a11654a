"""The pinned scripts: what every surface beside the exchange, the experts and the router is asked, chapter by chapter.

Whole layers and models are asked here too, which are run in ways of their own. A chapter says under which names its
workloads go and draws them for a variant on a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from moe_conformance.topology import Layout
from moe_conformance.workloads import (
    budget,
    capacity,
    copies,
    dispatch_layout,
    dropping_layers,
    every_bit,
    extreme_routing,
    float8_rows,
    forcing,
    identity,
    indivisible,
    knobs,
    layers,
    misuse,
    overflow,
    packed,
    packing,
    padded,
    permute,
    places,
    proxy_model,
    spoilt,
    token_exchange,
)
from moe_conformance.workloads.profiles import Profile, quick_layouts
from moe_conformance.workloads.records import Workload


@dataclass(frozen=True)
class Chapter:
    """The scripts of one chapter, of the kinds that they are of.

    A surface that has nothing to do with the exchange is asked once, with the backend's first variant. `quick` has the
    layouts on which the quick profile asks for what the way in which ranks are folded changes little.
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    draw: Callable[[str, Layout, Profile], Iterator[Workload]]
    variants: Literal["first", "every"] = "first"
    quick: tuple[Layout, ...] = quick_layouts()

    def drawn(self, variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
        """Yield what a profile has of it on a layout."""
        if profile == "full" or layout in self.quick:
            yield from self.draw(variant, layout, profile)


_ALONE, _SPREAD, _REPLICATED = Layout(1), Layout(2, ep=2), Layout(4, ep=2)
_CUT, _TENSOR = Layout(4, ep=2, etp=2), Layout(4, tp=2, ep=2)
_MOSTLY = (_ALONE, _SPREAD, _CUT)

CHAPTERS: tuple[Chapter, ...] = (
    Chapter(
        ("capacity",),
        tuple(recipe.name for recipe in capacity.CAPACITIES),
        capacity.capacities,
        quick=(_ALONE, _SPREAD, _TENSOR),
    ),
    Chapter(("extreme",), extreme_routing.names(), extreme_routing.extremes, quick=(_ALONE, _SPREAD)),
    Chapter(("forced", "forced draws", "forced masked"), forcing.names(), forcing.forcings, quick=(_ALONE, _SPREAD)),
    Chapter(("forced draws",), tuple(recipe.name for recipe in forcing.COPIES), forcing.copies, quick=(_TENSOR,)),
    Chapter(("padded", "experts"), padded.names(), padded.padded, "every", (_SPREAD, _CUT, _REPLICATED, _TENSOR)),
    Chapter(("knob",), knobs.names(), knobs.turned, "every", (_ALONE, _SPREAD, _CUT, _REPLICATED)),
    Chapter(
        ("dropping_layer",),
        tuple(recipe.name for recipe in layers.DROPPING),
        dropping_layers.dropping,
        "every",
        (_SPREAD, _CUT),
    ),
    Chapter(("permutation", "routing_forms", "reordering", "row_index"), permute.NAMES, permute.corpus),
    Chapter(("token_exchange",), tuple(token_exchange.SCRIPTS), token_exchange.scripts, quick=_MOSTLY),
    Chapter(("spoilt", "spoilt experts"), spoilt.NAMES, spoilt.draw, "every", _MOSTLY),
    Chapter(("identity",), identity.NAMES, identity.draw, "every", (_ALONE, _SPREAD, _REPLICATED)),
    Chapter(("dispatch_layout", "transport"), dispatch_layout.NAMES, dispatch_layout.corpus),
    Chapter(
        ("token_padding", "exchange"),
        packing.TOKEN_COUNTS,
        packing.token_counts,
        "every",
        (_ALONE, _SPREAD, _CUT, _TENSOR),
    ),
    Chapter(
        ("layer",),
        tuple(recipe.name for recipe in layers.LAYERS),
        layers.layers,
        "every",
        (_ALONE, _SPREAD, _CUT, _TENSOR),
    ),
    Chapter(("proxy",), proxy_model.NAMES, proxy_model.proxies, "every", (_REPLICATED, _TENSOR)),
    Chapter(("places_exchange",), tuple(places.SCRIPTS), places.scripts, quick=_MOSTLY),
    Chapter(("packing", "masked_router"), packing.SEQUENCES, packing.sequences),
    Chapter(("session",), indivisible.NAMES, indivisible.corpus, variants="every"),
    Chapter(("probe", "experts"), budget.names(), budget.budgets, "every", (_SPREAD, _CUT)),
    Chapter(("overflow",), tuple(overflow.OVERFLOWS), overflow.overflows, "every", (_SPREAD, _CUT)),
    Chapter(("token_exchange",), tuple(float8_rows.SCRIPTS), float8_rows.scripts, quick=_MOSTLY),
    Chapter(("exchange",), misuse.NAMES, misuse.draw, "every", (*_MOSTLY, _TENSOR)),
    Chapter(("session", "packed"), packed.names(), packed.draw, "every", (_SPREAD, _CUT, _TENSOR)),
    Chapter(("copies", "copies experts", "exchange"), copies.NAMES, copies.draw, "every", (_TENSOR,)),
    Chapter(("every bit",), every_bit.NAMES, every_bit.draw_all, "every", (_ALONE, _SPREAD, _CUT, _TENSOR)),
)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[tuple[Chapter, Workload]]:
    """Yield the scripts of a variant on a layout, each with its chapter, as if it were the backend's first variant."""
    for chapter in CHAPTERS:
        for workload in chapter.drawn(variant, layout, profile):
            yield chapter, workload


def names() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(name for each in CHAPTERS for name in each.names)
