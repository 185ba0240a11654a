"""The workloads made of stored rows, in which pairs of options meet that no other workload has.

They run in the rotation, and in the quick profile where they are selected by their names. The rows of a surface are a
table, `pairs/<surface>.csv` beside the file that declares it: a line for each, with a name that stays.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from moe_conformance.contract.topology import Layout
from moe_conformance.discovery import modules
from moe_conformance.workloads.chapter import Chapter
from moe_conformance.workloads.pairs.options import Row, Surface
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile, beside, quick_layouts

_SHARED = tuple(f"moe_conformance.workloads.pairs.{name}" for name in ("exchange", "layer", "router"))


@dataclass(frozen=True)
class Table:
    """A surface and where its rows are stored."""

    surface: Surface
    file: Path

    @property
    def rows(self) -> dict[str, Row]:
        """The stored rows by the names of their workloads."""
        return _read(self.file)


@cache
def _read(file: Path) -> dict[str, Row]:
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {row.pop("name"): row for row in csv.DictReader(lines)}


@cache
def tables() -> tuple[Table, ...]:
    """Return all surfaces: those that chapters share, then chapter by chapter."""
    found = []
    for module in (*map(importlib.import_module, _SHARED), *modules("options")):
        folder = Path(str(module.__file__)).parent
        found += [Table(each, folder / "pairs" / f"{each.name}.csv") for each in vars(module).get("SURFACES", ())]
    return tuple(found)


def layouts() -> dict[str, Layout]:
    """Return the layouts on which a workload of pairs may run, by name: those that the quick profile has."""
    return {layout.name: layout for layout in (*quick_layouts(), *beside("quick"))}


def layout_of(row: Row) -> str:
    """Return the name of a row's layout; a surface without that option runs on one rank."""
    return row.get("layout", "single")


def draw(table: Table, variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a surface on a layout; both profiles have the same."""
    del profile
    for name, row in table.rows.items():
        if layout_of(row) == layout.name:
            yield replace(_made(table.file, name, layout), rotates=True).through(variant)


@cache
def _made(file: Path, name: str, layout: Layout) -> Workload:
    table = next(each for each in tables() if each.file == file)
    return table.surface.make(name, table.rows[name], layout)


@cache
def chapters() -> tuple[Chapter, ...]:
    """Return the entries that register these workloads, one for each surface that has any."""
    return tuple(
        Chapter(
            table.surface.runs,
            tuple(table.rows),
            partial(draw, table),
            "first" if table.surface.first_variant else "every",
        )
        for table in tables()
        if table.rows
    )


@cache
def beside_names(layout: Layout) -> tuple[str, ...]:
    """Return the names of those that run on a layout of which the quick profile has a few workloads only."""
    return tuple(name for table in tables() for name, row in table.rows.items() if layout_of(row) == layout.name)
