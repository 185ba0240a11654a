"""The names of all workloads and layouts of all profiles, for what people write: waivers and tables."""

from __future__ import annotations

from moe_conformance.workloads import golden, recipes, routers, scripts, virtual
from moe_conformance.workloads.drawn import DRAWN_WITH, distribution
from moe_conformance.workloads.selection import profiles


def workload_names() -> frozenset[str]:
    """Return the names of all workloads of all profiles, and what a waiver calls those that are not to be drawn."""
    pinned = {recipe.name for recipe in (*recipes.PROBE, *recipes.EXPERTS)} | virtual.names()
    drawn = {DRAWN_WITH + feature.name for feature in (*distribution.PROBE, *distribution.ROUTE)}
    return frozenset(pinned | {recipe.name for recipe in routers.ROUTERS} | {golden.NAME} | drawn | scripts.names())


def layout_names() -> tuple[str, ...]:
    """Return the names of all layouts of all profiles, in running order."""
    return tuple(
        dict.fromkeys(
            layout.name for layout in (*profiles.layouts("full"), *profiles.beside("quick"), *virtual.layouts())
        )
    )
