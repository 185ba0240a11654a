"""The pinned scripts of every surface other than exchange, experts and router, and the workloads of layers and models.

They are found in the files of workloads of all chapters: a file registers its own in a tuple `CHAPTERS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from moe_conformance.contract.topology import Layout
from moe_conformance.discovery import modules
from moe_conformance.workloads.chapter import Chapter
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile


@cache
def chapters() -> tuple[Chapter, ...]:
    """Return the entries of `CHAPTERS` of all files of workloads."""
    return tuple(chapter for module in modules("workloads") for chapter in vars(module).get("CHAPTERS", ()))


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[tuple[Chapter, Workload]]:
    """Yield the scripts of a variant on a layout with their chapters, including those for the first variant only."""
    for chapter in chapters():
        for workload in chapter.drawn(variant, layout, profile):
            yield chapter, workload


def names() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(name for chapter in chapters() for name in chapter.names)
