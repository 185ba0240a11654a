"""The table of exchanges: the results of every variant on every layout, forward, backward, packed and so on.

It is made from the records of runs. No cell is empty: what was not judged is "not run".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from moe_conformance.contract.topology import Layout
from moe_conformance.report import matrix
from moe_conformance.report.records import Record
from moe_conformance.workloads import virtual
from moe_conformance.workloads.records.features import IN_FLIGHT, ZERO_TOKENS
from moe_conformance.workloads.selection import profiles


@dataclass(frozen=True)
class Column:
    """The items of some chapters of the spec, of all workloads or of those with a trait."""

    title: str
    chapters: tuple[str, ...]  # prefixes of ids
    trait: str = ""

    def holds(self, record: Record) -> bool:
        """Whether a record belongs here."""
        cited = any(requirement.partition("-")[0] in self.chapters for requirement in record.requirements)
        return cited and (not self.trait or self.trait in record.traits)


NOT_RUN = "not run"
SPARED = "spared"  # on the largest worlds only the first variant runs, see `virtual.suits`

_EXPLAINED = ("refused", "not adapted", "limit", "not applicable", "waived")
_SOME = 3  # layouts that a sentence names
_DIGITS = re.compile(r"\d+")

COLUMNS = (
    Column("forward", ("EXCH", "EXPT")),
    Column("backward", ("GRAD",)),
    Column("packed", ("PACK",)),
    Column("zero tokens", ("EXCH", "EXPT", "GRAD"), ZERO_TOKENS),
    Column("in flight", ("EXCH", "EXPT", "GRAD"), IN_FLIGHT),
)


@dataclass(frozen=True)
class Section:
    """One profile: the head of its report or merged reports, its records, and the commands."""

    head: Mapping[str, Any]
    records: Sequence[Record]
    parts: Sequence[str]


def page(command: str, sections: Sequence[Section]) -> str:
    """Return the table as Markdown, for all variants of the backend on all layouts of each profile.

    Args:
        command: The command that writes this page.
        sections: In the order of the page.
    """
    lines = [
        "# Exchanges on layouts",
        f"<!-- written by `{command}` -->",
        "A cell counts items, each a check on one workload. *Zero tokens*: of workloads in which a rank has none; *in "
        "flight*: of those in which several microbatches are under way at once. Where a backend refuses a layout, one "
        "workload of each kind proves it. Below each table are the sentences of what is refused or not adapted.",
    ]
    for section in sections:
        lines += _section(section)
    return "\n\n".join(lines) + "\n"


def _section(section: Section) -> Iterable[str]:
    head, records = section.head, section.records
    versions = " ".join(f"{name} {version}" for name, version in head["versions"].items())
    yield f"## {head['backend']}, profile {head['profile']}"
    yield f"{versions}; {head['device']}, up to {head['ranks']} ranks; {matrix.totals(records)}."
    if missing := [*head["problems"], *([head["stopped"]] if head["stopped"] else [])]:
        yield f"These runs failed outside of their items, or are incomplete: {'; '.join(missing)}."
    yield "\n".join(_rows(head, records))
    yield "\n".join(_sentences(records)) or "Nothing was refused, everything was adapted."
    yield "The runs:"
    yield "\n".join(f"- `{part}`" for part in section.parts)


def _rows(head: Mapping[str, Any], records: Sequence[Record]) -> Iterable[str]:
    titles = ("exchange", "layout", *(column.title for column in COLUMNS))
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join(['---'] * len(titles))} |"
    by_cell: dict[tuple[str | None, str | None], list[Record]] = {}
    for record in records:
        by_cell.setdefault((record.variant, record.layout), []).append(record)
    for variant in head["variants"]:
        for layout in _layouts(head["profile"], head["ranks"]):
            of_cell = by_cell.get((variant, layout.name), [])
            spared = head["profile"] == "virtual" and not virtual.suits(layout, variant == head["variants"][0])
            cells = (SPARED if spared else _cell(column, of_cell) for column in COLUMNS)
            yield f"| {' | '.join([variant, layout.name, *cells])} |"


def _layouts(profile: str, ranks: int) -> list[Layout]:
    if profile != "virtual":
        return list(profiles.layouts(cast(profiles.Profile, profile)))
    return [layout for layout in virtual.layouts() if layout.world <= ranks]


def _cell(column: Column, records: Sequence[Record]) -> str:
    held = [record for record in records if column.holds(record)]
    if held:
        return matrix.totals(held)
    if records and all(record.verdict == "refused" for record in records):
        return "refused"  # as a whole: one workload of each kind proves it, and the others do not run
    return NOT_RUN


def _sentences(records: Sequence[Record]) -> Iterable[str]:
    """Yield a line for each reason of a refusal or missing adapter; reasons that differ in numbers are one."""
    found: dict[tuple[str | None, str], list[Record]] = {}
    for record in records:
        if record.verdict in _EXPLAINED and any(column.holds(record) for column in COLUMNS):
            found.setdefault((record.variant, _DIGITS.sub("#", record.message)), []).append(record)
    for (variant, _), same in found.items():
        layouts = list(dict.fromkeys(record.layout or "any" for record in same))
        more = f" and {len(layouts) - _SOME} more" if len(layouts) > _SOME else ""
        where = ", ".join(layouts[:_SOME]) + more
        yield f"- {variant}, {len(same)} items on {where}: {' '.join(same[0].message.split())}"
