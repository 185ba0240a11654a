"""The stored selection: which cases the quick profile runs (docs/decisions/0010).

A backend may have a file. A table is a variant, a line of it a workload and the layouts on which it runs:

    [alltoall]
    even = "single ep2 ep2-edp2"

`python -m tools.select_cases` writes them; they are not edited by hand. A workload that a library's file does not
mention runs as it does for a backend without a file. One that native's does not mention either is new, and runs
wherever it can until the tool is run again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
GENERAL = "native"  # whose selection is used for backends without a file

Layouts = frozenset[str]
Stored = Mapping[str, Mapping[str, Layouts]]  # by variant and workload


@dataclass(frozen=True)
class Selection:
    """The names of the layouts on which workloads run, by variant and workload."""

    layouts: Stored
    known: frozenset[str]  # workloads for which layouts have been selected
    # Workloads whose layouts are native's, for a backend with other variants: the layouts of its own are not known.
    borrowed: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()  # workloads that the backend's file mentions

    def holds(self, variant: str, layout: str, workload: str) -> bool:
        """Return whether a case is selected; False for a workload that is not known."""
        return layout in self.layouts.get(variant, {}).get(workload, ())


def of(backend: str, variants: Sequence[str]) -> Selection:
    """Return the selection of a backend, given its name and its variants.

    Of workloads that the backend's file mentions it is what the file says. Of others it is native's, if the variants
    are native's, as those of planted bugs are. Any other backend runs with its first variant what native runs with its
    first, and with the others what native runs with any but its first.
    """
    general, stored = read(GENERAL), read(backend)
    known = _workloads(general) | _workloads(stored)
    alike = set(variants) <= set(general)
    layouts = general if alike else _borrowed(general, variants)
    mentioned = _workloads(stored)
    borrowed = frozenset[str]() if alike else known - mentioned
    if not stored:
        return Selection(layouts, known, borrowed, mentioned)
    rest = {
        variant: {name: where for name, where in row.items() if name not in mentioned}
        for variant, row in layouts.items()
    }
    selected = {variant: {**rest[variant], **stored.get(variant, {})} for variant in variants}
    return Selection(selected, known, borrowed, mentioned)


def _borrowed(general: Stored, variants: Sequence[str]) -> Stored:
    first, *others = general.values()
    union = {name: frozenset[str]().union(*(other.get(name, ()) for other in others)) for name in _workloads(general)}
    return {variant: first if variant == variants[0] else union for variant in variants}


def _workloads(tables: Stored) -> frozenset[str]:
    return frozenset(name for row in tables.values() for name in row)


@cache
def read(backend: str) -> Stored:
    """Return the stored table of a backend, variants in the order of the file; empty if there is no file."""
    path = FOLDER / f"{backend}.toml"
    if "/" in backend or not path.is_file():
        return {}
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        variant: {workload: frozenset(layouts.split()) for workload, layouts in table.items()}
        for variant, table in tables.items()
    }
