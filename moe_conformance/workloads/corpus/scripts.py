"""The pinned scripts: what every surface beside the exchange, the experts and the router is asked, chapter by chapter.

Whole layers and models are asked here too, which are run in ways of their own. Every file of the corpus that has a
tuple `CHAPTERS` is found; there is no list to add it to.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.chapter import Chapter
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile


@cache
def chapters() -> tuple[Chapter, ...]:
    """Return the chapters of all files of the corpus, file by file."""
    package = __name__.rpartition(".")[0]
    files = pkgutil.walk_packages([str(Path(__file__).parent)], f"{package}.")
    modules = [importlib.import_module(each.name) for each in files if each.name != __name__]
    return tuple(chapter for module in modules for chapter in vars(module).get("CHAPTERS", ()))


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[tuple[Chapter, Workload]]:
    """Yield the scripts of a variant on a layout, each with its chapter, as if it were the backend's first variant."""
    for chapter in chapters():
        for workload in chapter.drawn(variant, layout, profile):
            yield chapter, workload


def names() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(name for each in chapters() for name in each.names)
