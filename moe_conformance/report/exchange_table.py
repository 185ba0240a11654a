"""The table of exchanges: every variant on every layout, and how it fared forward, backward, packed and so on.

It is made of the records of runs, and every cell says something: what was not judged says "not run".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from moe_conformance.report import matrix
from moe_conformance.report.records import Record
from moe_conformance.workloads import corpus, virtual
from moe_conformance.workloads.features import IN_FLIGHT, ZERO_TOKENS


@dataclass(frozen=True)
class Column:
    """The items of some chapters of the law, of all workloads or of those with a trait."""

    title: str
    chapters: tuple[str, ...]  # prefixes of ids
    trait: str = ""

    def holds(self, record: Record) -> bool:
        """Whether a record belongs here."""
        cited = any(each.partition("-")[0] in self.chapters for each in record.requirements)
        return cited and (not self.trait or self.trait in record.traits)


COLUMNS = (
    Column("forward", ("EXCH", "EXPT")),
    Column("backward", ("GRAD",)),
    Column("packed", ("PACK",)),
    Column("zero tokens", ("EXCH", "EXPT", "GRAD"), ZERO_TOKENS),
    Column("in flight", ("EXCH", "EXPT", "GRAD"), IN_FLIGHT),
)


def page(head: Mapping[str, Any], records: Sequence[Record], parts: Iterable[str]) -> str:
    """Return the table as Markdown, for all variants of the backend on all layouts of the profile.

    Args:
        head: Of the report, or of reports that were put together; its command made this page.
        records: Theirs.
        parts: The commands of the runs.
    """
    versions = " ".join(f"{name} {version}" for name, version in head["versions"].items())
    lines = [
        "# Exchanges on layouts",
        f"<!-- written by `{head['command']}` -->",
        f"{head['backend']} ({versions}), profile {head['profile']}, {head['device']}. A cell counts items, each a "
        "check on one workload. *Zero tokens*: of workloads in which a rank has none; *in flight*: of those in which "
        "several microbatches are under way at once. Where a backend refuses a layout, one workload of each "
        "kind proves it.",
        "\n".join(_rows(head, records)),
        "The runs:",
        "\n".join(f"- `{part}`" for part in parts),
    ]
    return "\n\n".join(lines) + "\n"


def _rows(head: Mapping[str, Any], records: Sequence[Record]) -> Iterable[str]:
    titles = ("exchange", "layout", *(column.title for column in COLUMNS))
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join(['---'] * len(titles))} |"
    by_cell: dict[tuple[str | None, str | None], list[Record]] = {}
    for record in records:
        by_cell.setdefault((record.variant, record.layout), []).append(record)
    for variant in head["variants"]:
        for layout in _layouts(head["profile"]):
            own = by_cell.get((variant, layout), [])
            yield f"| {' | '.join([variant, layout, *(_cell(column, own) for column in COLUMNS)])} |"


def _layouts(profile: str) -> list[str]:
    found = virtual.layouts() if profile == "virtual" else corpus.layouts(cast(corpus.Profile, profile))
    return [layout.name for layout in found]


def _cell(column: Column, records: Sequence[Record]) -> str:
    held = [record for record in records if column.holds(record)]
    if held:
        return matrix.totals(held)
    if records and all(record.verdict == "refused" for record in records):
        return "refused"  # whatever is asked: one workload of each kind proves it, and the others are not asked
    return "not run"
