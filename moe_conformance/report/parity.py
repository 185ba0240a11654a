"""The parity table in words: text for a terminal, Markdown, JSON, and what report.html shows of a run.

JSON is described by `parity.schema.json` in this folder. A change of the format increases `SCHEMA` here and there.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Lines

from moe_conformance.chapters.training.parity import QUANTITIES, ROWS, Compared, Row
from moe_conformance.judging.verdict import MOST, Deviation
from moe_conformance.report.records import Record

SCHEMA = 1


@dataclass(frozen=True)
class Table:
    """The rows of a backend."""

    backend: str
    versions: Mapping[str, str]
    ranks: int
    command: str
    rows: Sequence[tuple[Row, Compared]]

    @property
    def compared(self) -> int:
        """The number of cells with a number."""
        return sum(isinstance(cell, Deviation) for _, row in self.rows for cell in row.cells.values())

    @property
    def held(self) -> bool:
        """Whether every number is within 1, nothing failed, and there is a number."""
        return self.compared > 0 and all(row.held for _, row in self.rows)

    @property
    def title(self) -> str:
        """The backend with its versions, such as `native (torch 2.13.0), up to 4 ranks`."""
        versions = ", ".join(f"{name} {each}" for name, each in self.versions.items())
        return f"{self.backend} ({versions}), up to {self.ranks} ranks"


def number(deviation: Deviation) -> str:
    """Return the number of a cell; `inf` where what was found is not finite, or absent.

    >>> number(Deviation("loss", 0.12345)), number(Deviation("loss", 1e300))
    ('0.12', 'inf')
    """
    return "inf" if deviation.ratio >= MOST else f"{deviation.ratio:.2g}"


def words(deviation: Deviation) -> str:
    """Return a cell as a phrase: its number, where that is, and by which factor all elements differ."""
    factor = f"; all of what is wrong: {deviation.factor}" if deviation.factor else ""
    return f"{number(deviation)}, {deviation.at}{factor}"


def text(table: Table, *, width: int, encoding: str) -> str:
    """Return the table for a terminal, with the largest deviation of every layout, reasons and failures below it."""
    lines = Lines(box=box.SIMPLE_HEAD if "utf" in encoding.lower() else box.ASCII2, padding=(0, 0, 0, 1))
    lines.add_column("layout", no_wrap=True)
    for quantity in QUANTITIES:
        lines.add_column(quantity.replace(" after ", "\n"), justify="right")
    reasons: dict[str, list[str]] = {}
    for row, compared in table.rows:
        shown = []
        for quantity, cell in compared.cells.items():
            shown.append(number(cell) if isinstance(cell, Deviation) else "-")
            if isinstance(cell, str):
                reasons.setdefault(f"{row.name}: {cell}", []).append(quantity)
        lines.add_row(row.name, *shown)
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(lines)
    assert isinstance(console.file, io.StringIO)
    below = ["largest on each layout:", *(f"  {line}" for line in _largest(table))] if table.compared else []
    if reasons:
        below += ["without a number:", *(f"  {_quantities(of)} on {reason}" for reason, of in reasons.items())]
    below += [f"failed on {place}" for place in _failures(table)]
    title = f"{table.title}: the largest error of each, over what rounding allows"
    shown = [title, console.file.getvalue().rstrip(), "", *(" ".join(line.split("\n")) for line in below)]
    return "\n".join([*shown, verdict(table)])


def verdict(table: Table) -> str:
    """Return the last line: whether parity holds."""
    if not table.compared:
        return "nothing was compared"
    return f"{'equal to' if table.held else 'NOT equal to'} one device: {table.compared} of {_cells(table)} compared"


def markdown(table: Table) -> str:
    """Return the table in Markdown, each cell with the parameter that is worst."""
    head = ["layout", *QUANTITIES]
    lines = [f"## {table.title}", ""]
    lines += [_line(head), _line("---" for _ in head)]
    reasons: list[str] = []
    for row, compared in table.rows:
        shown = [row.name]
        for cell in compared.cells.values():
            if isinstance(cell, str) and cell not in reasons:
                reasons.append(cell)
            shown.append(words(cell) if isinstance(cell, Deviation) else f"({reasons.index(cell) + 1})")
        lines.append(_line(shown))
    lines += ["", *(f"{place + 1}. {_escaped(reason)}" for place, reason in enumerate(reasons))]
    failures = [f"* {_escaped(each)}" for each in _failures(table)]
    lines += ["", *(["Failed:", "", *failures, ""] if failures else []), f"{verdict(table)}.".capitalize()]
    return "\n".join(lines)


def to_json(table: Table) -> str:
    """Return the table as JSON, as `parity.schema.json` has it."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "suite": version("moe-conformance"),
        "backend": table.backend,
        "versions": dict(table.versions),
        "ranks": table.ranks,
        "command": table.command,
        "held": table.held,
        "rows": [
            {
                "name": row.name,
                "layout": row.layout.name,
                "scripts": compared.ran,
                "cells": [_json_of(quantity, cell) for quantity, cell in compared.cells.items()],
                "failures": compared.failures,
            }
            for row, compared in table.rows
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def of_records(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table that a run has: names of layouts, and of each quantity a phrase.

    Empty if no training was judged. A layout on which none was has the reason in its cells, that of a record if there
    is one.
    """
    if not any(record.deviations for record in records):
        return []
    return [(row.name, _of_row(row, records)) for row in ROWS]


def _of_row(row: Row, records: Iterable[Record]) -> list[str]:
    here = [each for each in records if each.layout == row.layout.name and each.workload in row.scripts]
    largest: dict[str, Deviation] = {}
    for record in here:
        for quantity, fields in record.deviations.items():
            found = Deviation(quantity, **fields)
            if quantity not in largest or found.ratio > largest[quantity].ratio:
                largest[quantity] = found
    why = next((each.message for each in here if each.verdict in ("refused", "not adapted", "limit")), "")
    why = why or row.why or "not judged in this run"
    return [words(largest[each]) if each in largest else why for each in QUANTITIES]


def _json_of(quantity: str, cell: Deviation | str) -> dict[str, Any]:
    return {"quantity": quantity, **({"why": cell} if isinstance(cell, str) else cell.plain())}


def _largest(table: Table) -> Iterator[str]:
    for row, compared in table.rows:
        cells = [cell for cell in compared.cells.values() if isinstance(cell, Deviation)]
        if cells:
            worst = max(cells, key=lambda cell: cell.ratio)
            yield f"{row.name}: {worst.quantity} {words(worst)} ({', '.join(compared.ran)})"


def _failures(table: Table) -> list[str]:
    return [f"{row.name}: {failure}" for row, compared in table.rows for failure in compared.failures]


def _quantities(of: Sequence[str]) -> str:
    return "all" if len(of) == len(QUANTITIES) else ", ".join(of)


def _cells(table: Table) -> str:
    return f"{len(table.rows) * len(QUANTITIES)} cells"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(cell: str) -> str:
    for sign, other in {"&": "&amp;", "<": "&lt;", "|": "\\|", "\n": " "}.items():
        cell = cell.replace(sign, other)
    return cell
