"""The matrix: requirements or chapters by layout, one sign per cell, with a legend of the signs that occur."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_conformance.report.records import FAILING, Record, Verdict, overall
from moe_conformance.report.standing import JUDGED
from moe_conformance.spec import Requirement

# sign, sign in a terminal that has only ASCII, colour
SIGNS: Mapping[Verdict, tuple[str, str, str]] = {
    "pass": ("✓", "+", "green"),
    "fail": ("✗", "F", "bold red"),
    "crash": ("C", "C", "bold red"),
    "hang": ("H", "H", "bold red"),
    "unstable": ("~", "~", "bold red"),
    "error": ("E", "E", "bold red"),
    "vacuous": ("V", "V", "bold red"),
    "unexpected pass": ("U", "U", "bold red"),
    "infrastructure": ("I", "I", "bold magenta"),
    "waived": ("W", "W", "yellow"),
    "not kept": ("s", "s", "yellow"),
    "refused": ("r", "r", "cyan"),
    "not adapted": ("a", "a", "cyan"),
    "limit": ("L", "L", "cyan"),
    "not applicable": ("-", "-", "dim"),
    "not run": ("·", ".", "dim"),
}


@dataclass(frozen=True)
class _Row:
    """A row of the matrix: its name, how many requirements it holds and judged, and how its items ended by layout."""

    name: str
    judged: str
    cells: Mapping[str, Counter[Verdict]]
    idle: bool = False  # nothing was judged and nothing failed


def matrix(
    requirements: Sequence[Requirement],
    layouts: Sequence[str],
    records: Iterable[Record],
    *,
    width: int,
    color: bool,
    encoding: str,
    whole: bool = True,
) -> str:
    """Return the matrix as lines for a terminal; a failing cell shows how many of its items failed.

    Layouts come in the given order, without those that have no record; checks without a layout are in the column `any`.
    If only a part of a cell's cases was judged, it shows the percentage. The `whole` matrix has a row for every
    requirement. The other one has a row for every chapter in which something was judged or failed, and below it a row
    for each of its requirements that failed; the other chapters that ran are named at the end.
    """
    column = 1 if "utf" not in encoding.lower() else 0
    cells: dict[str, dict[str, Counter[Verdict]]] = {}
    for record in records:
        for requirement in record.requirements:
            count = cells.setdefault(requirement, {}).setdefault(record.layout or "any", Counter())
            count[record.verdict] += record.cases
    layouts = [layout for layout in (*layouts, "any") if any(layout in row for row in cells.values())]
    rows = _of_requirements(requirements, layouts, cells) if whole else list(_of_chapters(requirements, cells))
    idle = [row.name for row in rows if row.idle]
    rows = [row for row in rows if not row.idle]
    table = Table(box=box.SIMPLE_HEAD if column == 0 else box.ASCII2, pad_edge=False)
    table.add_column("requirement" if whole else "chapter")
    if not whole:
        table.add_column("judged", justify="right", vertical="bottom")
    for layout in layouts:
        table.add_column(layout.replace("-", "\n"), justify="center", vertical="bottom")
    seen: set[Verdict] = set()
    for row in rows:
        judged_ = () if whole else (row.judged,)
        shown = (_cell(row.cells[layout], column) if layout in row.cells else "" for layout in layouts)
        table.add_row(row.name, *judged_, *shown)
        seen |= {overall(count) for count in row.cells.values()}
    legend = Text("  ").join(_explained(verdict, column) for verdict in SIGNS if verdict in seen)
    shown_ = _render(table, width, color) if rows else ""
    nothing = f"nothing judged in: {', '.join(idle)}\n" if idle else ""
    return shown_ + _render(legend, width, color) + nothing


def _of_requirements(
    requirements: Sequence[Requirement], layouts: Sequence[str], cells: Mapping[str, Mapping[str, Counter[Verdict]]]
) -> list[_Row]:
    """Return a row for each requirement, whether it ran or not."""
    # A requirement without any record is "not run" in every column; elsewhere an empty cell has nothing to judge.
    nothing = {layout: Counter[Verdict]({"not run": 1}) for layout in layouts}
    return [_Row(requirement.id, "", cells.get(requirement.id) or nothing) for requirement in requirements]


def _of_chapters(
    requirements: Sequence[Requirement], cells: Mapping[str, Mapping[str, Counter[Verdict]]]
) -> Iterator[_Row]:
    """Yield a row for each chapter that ran, followed by the rows of its requirements that failed."""
    for chapter, of_chapter in groupby(requirements, key=lambda requirement: requirement.chapter):
        ids = [requirement.id for requirement in of_chapter]
        ran = {id: cells[id] for id in ids if id in cells}
        if not ran:
            continue
        added: dict[str, Counter[Verdict]] = {}
        for row in ran.values():
            for layout, count in row.items():
                added.setdefault(layout, Counter()).update(count)
        found = sum(_has(row, JUDGED) for row in ran.values())
        yield _Row(chapter, f"{found} of {len(ids)}", added, idle=not found and not _has(added, FAILING))
        for id, row in ran.items():
            if _has(row, FAILING):
                yield _Row(f"  {id}", "", row)


def _has(row: Mapping[str, Counter[Verdict]], verdicts: Collection[Verdict]) -> bool:
    return any(verdict in verdicts for count in row.values() for verdict in count)


def _cases(count: Counter[Verdict], verdicts: Iterable[Verdict]) -> int:
    return sum(count[verdict] for verdict in verdicts)


def _cell(count: Counter[Verdict], column: int) -> Text:
    verdict = overall(count)
    sign = Text(SIGNS[verdict][column], style=SIGNS[verdict][2])
    if failing := _cases(count, FAILING):
        sign.append(str(failing))
    elif (judged := _cases(count, JUDGED)) and judged < count.total():
        sign.append(f" {max(1, 100 * judged // count.total())}%", style="dim")
    return sign


def judged(records: Iterable[Record], requested: Collection[str], requirements: int) -> str:
    """Return how many requirements were judged, of the requested ones and of all, in words."""
    found = {requirement for record in records if record.verdict in JUDGED for requirement in record.requirements}
    return f"judged {len(found & set(requested))} of {len(requested)} requirements asked for, of {requirements} in all"


def waived(records: Iterable[Record]) -> str:
    """Return which share of each requirement's cases is waived, such as `EXPT-01 62 of 186 (TT-01)`; "" if none is."""
    cases: Counter[str] = Counter()
    excused: Counter[str] = Counter()
    ids: dict[str, dict[str, None]] = {}
    for record in records:
        for requirement in record.requirements:
            if record.verdict in JUDGED:
                cases[requirement] += record.cases
            if record.verdict == "waived":
                excused[requirement] += record.cases
                ids.setdefault(requirement, {})[record.waiver or "?"] = None
    shares = [
        f"{requirement} {excused[requirement]} of {cases[requirement]} ({', '.join(ids[requirement])})"
        for requirement in sorted(excused)
    ]
    return f"waived, of the cases judged: {'; '.join(shares)}" if shares else ""


def _explained(verdict: Verdict, column: int) -> Text:
    return Text(SIGNS[verdict][column], style=SIGNS[verdict][2]).append(f" {verdict}", style="not bold")


def _render(what: Table | Text, width: int, color: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(what)
    return out.getvalue()


def totals(records: Iterable[Record]) -> str:
    """Return how many items ended how, failures first: `2 fail, 310 pass, 40 refused`."""
    count: Counter[Verdict] = Counter()
    for record in records:
        count[record.verdict] += record.cases
    order = sorted(SIGNS, key=lambda verdict: verdict not in FAILING)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in order if count[verdict]) or "no item"
