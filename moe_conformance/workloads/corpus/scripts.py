"""The pinned scripts: what every surface beside the exchange, the experts and the router is asked, chapter by chapter.

Whole layers and models are asked here too, which are run in ways of their own. A chapter says under which names its
workloads go and draws them for a variant on a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus import (
    config_rules,
    forcing,
    misuse,
    non_finite,
    permute,
    shared_experts,
    token_padding,
    tp_duplicated_tokens,
)
from moe_conformance.workloads.corpus.capacity import (
    budget_overflow,
    dropping_layers,
    padded_experts,
    receive_budget,
    routers,
)
from moe_conformance.workloads.corpus.exchange import full_precision, identity_experts, one_option
from moe_conformance.workloads.corpus.groups import divisibility, proxy_model
from moe_conformance.workloads.corpus.routing import extreme_logits
from moe_conformance.workloads.corpus.token_exchange import dispatch_layout, fp8_wire, handles, low_latency
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile, quick_layouts


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
        tuple(recipe.name for recipe in routers.CAPACITIES),
        routers.capacities,
        quick=(_ALONE, _SPREAD, _TENSOR),
    ),
    Chapter(("extreme",), extreme_logits.names(), extreme_logits.extremes, quick=(_ALONE, _SPREAD)),
    Chapter(("forced", "forced draws", "forced masked"), forcing.names(), forcing.forcings, quick=(_ALONE, _SPREAD)),
    Chapter(("forced draws",), tuple(recipe.name for recipe in forcing.COPIES), forcing.copies, quick=(_TENSOR,)),
    Chapter(
        ("padded", "experts"),
        padded_experts.names(),
        padded_experts.padded,
        "every",
        (_SPREAD, _CUT, _REPLICATED, _TENSOR),
    ),
    Chapter(("knob",), one_option.names(), one_option.turned, "every", (_ALONE, _SPREAD, _CUT, _REPLICATED)),
    Chapter(
        ("dropping_layer",),
        tuple(recipe.name for recipe in shared_experts.DROPPING),
        dropping_layers.dropping,
        "every",
        (_SPREAD, _CUT),
    ),
    Chapter(("permutation", "routing_forms", "reordering", "row_index"), permute.NAMES, permute.corpus),
    Chapter(("token_exchange",), tuple(handles.SCRIPTS), handles.scripts, quick=_MOSTLY),
    Chapter(("spoilt", "spoilt experts"), non_finite.NAMES, non_finite.draw, "every", _MOSTLY),
    Chapter(("identity",), identity_experts.NAMES, identity_experts.draw, "every", (_ALONE, _SPREAD, _REPLICATED)),
    Chapter(("dispatch_layout", "transport"), dispatch_layout.NAMES, dispatch_layout.corpus),
    Chapter(
        ("token_padding", "exchange"),
        token_padding.TOKEN_COUNTS,
        token_padding.token_counts,
        "every",
        (_ALONE, _SPREAD, _CUT, _TENSOR),
    ),
    Chapter(
        ("layer",),
        tuple(recipe.name for recipe in shared_experts.LAYERS),
        shared_experts.layers,
        "every",
        (_ALONE, _SPREAD, _CUT, _TENSOR),
    ),
    Chapter(("proxy",), proxy_model.NAMES, proxy_model.proxies, "every", (_REPLICATED, _TENSOR)),
    Chapter(("places_exchange",), tuple(low_latency.SCRIPTS), low_latency.scripts, quick=_MOSTLY),
    Chapter(("packing", "masked_router"), token_padding.SEQUENCES, token_padding.sequences),
    Chapter(("session",), divisibility.NAMES, divisibility.corpus, variants="every"),
    Chapter(("probe", "experts"), receive_budget.names(), receive_budget.budgets, "every", (_SPREAD, _CUT)),
    Chapter(("overflow",), tuple(budget_overflow.OVERFLOWS), budget_overflow.overflows, "every", (_SPREAD, _CUT)),
    Chapter(("token_exchange",), tuple(fp8_wire.SCRIPTS), fp8_wire.scripts, quick=_MOSTLY),
    Chapter(("exchange",), misuse.NAMES, misuse.draw, "every", (*_MOSTLY, _TENSOR)),
    Chapter(("session", "packed"), config_rules.names(), config_rules.draw, "every", (_SPREAD, _CUT, _TENSOR)),
    Chapter(
        ("copies", "copies experts", "exchange"),
        tp_duplicated_tokens.NAMES,
        tp_duplicated_tokens.draw,
        "every",
        (_TENSOR,),
    ),
    Chapter(("every bit",), full_precision.NAMES, full_precision.draw_all, "every", (_ALONE, _SPREAD, _CUT, _TENSOR)),
)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[tuple[Chapter, Workload]]:
    """Yield the scripts of a variant on a layout, each with its chapter, as if it were the backend's first variant."""
    for chapter in CHAPTERS:
        for workload in chapter.drawn(variant, layout, profile):
            yield chapter, workload


def names() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(name for each in CHAPTERS for name in each.names)
