"""The pinned scripts: what every surface beside the exchange, the experts and the router is asked, chapter by chapter.

Whole layers and models are asked here too, which are run in ways of their own. The workloads of every chapter of the
spec are found, file by file, where a file has a tuple `CHAPTERS`.
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
    """Return what all files of workloads have, file by file."""
    return tuple(chapter for module in modules("workloads") for chapter in vars(module).get("CHAPTERS", ()))


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[tuple[Chapter, Workload]]:
    """Yield the scripts of a variant on a layout, each with its chapter, as if it were the backend's first variant."""
    for chapter in chapters():
        for workload in chapter.drawn(variant, layout, profile):
            yield chapter, workload


def names() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(name for each in chapters() for name in each.names)
