"""The pinned scripts of all chapters, and the names of all workloads and layouts of all profiles.

Scripts are those of every surface other than exchange, experts and router, and the workloads of layers and models. They
are found in the files of workloads of all chapters: a file registers them in a tuple `CHAPTERS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from moe_conformance.contract.topology import Layout
from moe_conformance.discovery import modules
from moe_conformance.workloads import golden, recipes, routers, virtual
from moe_conformance.workloads.chapter import Chapter
from moe_conformance.workloads.drawn import DRAWN_WITH, distribution
from moe_conformance.workloads.pairs import cases as pairs
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection import profiles
from moe_conformance.workloads.selection.profiles import Profile


@cache
def chapters() -> tuple[Chapter, ...]:
    """Return the entries of `CHAPTERS` of all files of workloads, then those of pairs of options."""
    own = (chapter for module in modules("workloads") for chapter in vars(module).get("CHAPTERS", ()))
    return (*own, *pairs.chapters())


def beside(profile: Profile) -> dict[Layout, tuple[str, ...]]:
    """Return layouts of which a profile runs some workloads only, with their names.

    They are those of `profiles.beside`, what chapters draw that name such a layout, and pairs of options.
    """
    found = {}
    for layout, some in profiles.beside(profile).items():
        own = (name for chapter in chapters() if layout in chapter.quick for name in chapter.names)
        found[layout] = tuple(dict.fromkeys((*some, *own, *pairs.beside_names(layout))))
    return found


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[tuple[Chapter, Workload]]:
    """Yield the scripts of a variant on a layout with their chapters, including those for the first variant only."""
    for chapter in chapters():
        for workload in chapter.drawn(variant, layout, profile):
            yield chapter, workload


def names() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(name for chapter in chapters() for name in chapter.names)


def workload_names() -> frozenset[str]:
    """Return the names of all workloads of all profiles, and what a waiver calls those that are not to be drawn."""
    pinned = {recipe.name for recipe in (*recipes.PROBE, *recipes.EXPERTS)} | virtual.names()
    drawn = {DRAWN_WITH + feature.name for feature in (*distribution.PROBE, *distribution.ROUTE)}
    return frozenset(pinned | {recipe.name for recipe in routers.ROUTERS} | {golden.NAME} | drawn | names())


def layout_names() -> tuple[str, ...]:
    """Return the names of all layouts of all profiles, in running order."""
    return tuple(
        dict.fromkeys(
            layout.name for layout in (*profiles.layouts("full"), *profiles.beside("quick"), *virtual.layouts())
        )
    )
