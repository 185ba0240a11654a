"""Rows and bytes sent between ranks, and the least possible: for every exchange and layout of the worst workload.

The least possible is every row once to each other rank that needs it, its result once back, and no other byte.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from moe_conformance.report.records import Record


@dataclass(frozen=True)
class Worst:
    """What all ranks sent in the forwards of one workload; `calls` is the maximum per rank and forward."""

    variant: str
    layout: str
    workload: str
    rows: float
    least_rows: float
    bytes: float
    least_bytes: float
    calls: float

    @property
    def ratio(self) -> float:
        """Rows sent over the least possible."""
        return self.rows / self.least_rows


def worst(records: Iterable[Record]) -> list[Worst]:
    """Return, for every variant and layout, the workload with the largest ratio of rows.

    Workloads in which no row has to be sent have no ratio, and are left out.
    """
    found: dict[tuple[str | None, str | None], Worst] = {}
    for record in records:
        if not record.travelled.get("least_rows"):
            continue
        here = Worst(record.variant or "", record.layout or "", record.workload or "", **record.travelled)
        known = found.get((here.variant, here.layout))
        if known is None or known.ratio < here.ratio:
            found[here.variant, here.layout] = here
    return list(found.values())


def table(layouts: Sequence[str], records: Iterable[Record], *, width: int, encoding: str) -> str:
    """Return a line for each layout and a column for each variant, say `1.50, 1.61; 3`; "" if there is nothing."""
    found = {(moved.variant, moved.layout): moved for moved in worst(records)}
    if not found:
        return ""
    variants = list(dict.fromkeys(variant for variant, _ in found))
    lines = Table(box=box.SIMPLE_HEAD if "utf" in encoding.lower() else box.ASCII2, pad_edge=False)
    for title in ("rows, bytes / smallest possible; calls", *variants):
        lines.add_column(title)
    used = {layout for _, layout in found}
    for layout in filter(used.__contains__, layouts):
        lines.add_row(layout, *(_cell(found.get((variant, layout))) for variant in variants))
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(lines)
    return "in forward, largest over workloads:\n" + out.getvalue().rstrip("\n")


def _cell(travelled: Worst | None) -> str:
    if travelled is None:
        return "not run"
    return f"{travelled.ratio:.2f}, {travelled.bytes / travelled.least_bytes:.2f}; {travelled.calls:g}"
