"""Exchanges of packed sequences: built with the option and without, and run with token counts that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, TP2_EP2, Chapter
from moe_conformance.workloads.recipes import GAPPED, UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records.features import exchanges
from moe_conformance.workloads.records.routes import gaps
from moe_conformance.workloads.records.runs import ON_SESSION, ExchangeStep
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import Profile

BUILT = "packed-built"
_PACKED: dict[str, Any] = {"padding.packed": True}

PROBE = (
    Recipe("packed-sequences-even", config=_PACKED),
    Recipe("packed-sequences-uneven", tokens=UNEVEN, config=_PACKED),
    Recipe("packed-sequences-rank-without-tokens", tokens=(7, 0, 9, 4), config=_PACKED),
    Recipe("packed-sequences-in-flight-uneven", tokens=UNEVEN, config=_PACKED, schedule="F0 F1 B1 B0"),
    Recipe("packed-sequences-gaps-uneven", gaps, tokens=GAPPED, config=_PACKED),
)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout, if it spreads experts over ranks."""
    del profile
    if not exchanges(layout):
        return
    fed = [exchange_workload(recipe, ExchangeStep(), variant, layout) for recipe in PROBE]
    config = fed[0].config
    configs = (config.changed({"padding.packed": False}), config)
    calls = tuple(Call("exchange", ({"config": built},) * layout.world, may_raise=True) for built in configs)
    yield Workload(BUILT, ON_SESSION, config.changed({"padding.packed": False}), layout, (), calls=calls)
    yield from (replace(workload, run=ExchangeStep(option="packing")) for workload in fed)


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return (BUILT, *(recipe.name for recipe in PROBE))


CHAPTERS = (Chapter((ON_SESSION, ExchangeStep(option="packing")), names(), draw, "every", (EP2, EP2_ETP2, TP2_EP2)),)
