"""The stored selection: which cases the quick profile runs (docs/decisions/0010).

A backend may have a file. A table is a variant, a line of it a workload and the layouts on which it runs:

    [alltoall]
    even = "single ep2 ep2-edp2"

`python -m tools.select_cases` writes them; they are not edited by hand. A workload that a file does not mention is
new, and runs wherever it can until the tool is run again.
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
    borrowed: bool = False  # from native, for a backend without a file that has other variants

    def holds(self, variant: str, layout: str, workload: str) -> bool:
        """Return whether a case is selected; False for a workload that is not known."""
        return layout in self.layouts.get(variant, {}).get(workload, ())


def of(backend: str, variants: Sequence[str]) -> Selection:
    """Return the selection of a backend, given its name and its variants.

    It is that of the backend's file, if there is one. Else it is native's, if the variants are native's, as those of
    planted bugs are. Any other backend runs with its first variant what native runs with its first, and with the others
    what native runs with any but its first.
    """
    stored = read(backend)
    general = stored or read(GENERAL)
    known = frozenset(name for names in general.values() for name in names)
    if stored or set(variants) <= set(general):
        return Selection(general, known)
    first, *others = general.values()
    union = {name: frozenset().union(*(other.get(name, ()) for other in others)) for name in known}
    layouts = {variant: first if variant == variants[0] else union for variant in variants}
    return Selection(layouts, known, borrowed=True)


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
