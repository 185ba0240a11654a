"""What the page shows, as plain data: totals, the matrix, the story of each of its cells, traffic, errors, reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_conformance import spec
from moe_conformance.report import travelled, unjudged, words
from moe_conformance.report.matrix import SIGNS
from moe_conformance.report.records import FAILING, Record, Verdict, overall
from moe_conformance.report.result import Report
from moe_conformance.report.standing import JUDGED
from moe_conformance.workloads.names import layout_names

_IN_FULL = 5  # failures of a cell that are told with their detail
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Cell:
    """A requirement on a layout: what all its cases come to."""

    key: str  # of its story
    verdict: Verdict
    sign: str
    note: str  # how many failed, or which share was judged
    label: str  # all of it in words


@dataclass(frozen=True)
class Row:
    """A requirement with its cells by layout; None where it has no case."""

    id: str
    chapter: str
    level: str
    sentence: str
    verdict: Verdict
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Errors:
    """Errors of one dtype over those that its bounds allow: how many checks lie in each tenth, and the largest."""

    dtype: str
    tenths: tuple[int, ...]
    worst: float
    item: str


@dataclass(frozen=True)
class Content:
    """All that the page shows."""

    head: Mapping[str, Any]
    title: str
    verdict: str  # passed, failed, stopped
    totals: tuple[tuple[Verdict, int], ...]
    judged: tuple[int, int, int]  # requirements: judged, asked for, of the spec
    failures: tuple[tuple[str, str], ...]  # title and text, as the terminal tells them
    layouts: tuple[str, ...]
    chapters: tuple[str, ...]
    rows: tuple[Row, ...]
    legend: tuple[tuple[str, Verdict], ...]
    stories: Mapping[str, Sequence[Mapping[str, Any]]]
    variants: tuple[str, ...]
    traffic: tuple[tuple[str, tuple[str, ...]], ...]  # by layout, for each variant
    errors: tuple[Errors, ...]
    reasons: tuple[str, ...]
    not_run: tuple[tuple[str, str], ...]


def content(report: Report) -> Content:
    """Return what the page of a report shows."""
    head, records = report.head, report.records
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        for each in record.requirements:
            cells.setdefault((each, record.layout or "any"), []).append(record)
    layouts = tuple(name for name in (*layout_names(), "any") if any(at == name for _, at in cells))
    known = spec.load()
    rows = tuple(
        Row(
            each,
            known[each].chapter,
            known[each].level,
            known[each].sentence,
            overall(record.verdict for layout in layouts for record in cells.get((each, layout), ())),
            tuple(_cell(each, layout, cells.get((each, layout), ())) for layout in layouts),
        )
        for each in known
        if any((each, layout) in cells for layout in layouts)
    )
    found = words.groups(records)
    return Content(
        head=head,
        title=f"native with the planted bug {head['plant']}" if head["plant"] else head["backend"],
        verdict="stopped" if head["stopped"] else "passed" if head["exit"] == 0 else "failed",
        totals=_totals(records),
        judged=_judged(head, records, len(known)),
        failures=tuple(words.tell(found, head["again"])),
        layouts=layouts,
        chapters=tuple(dict.fromkeys(row.chapter for row in rows)),
        rows=rows,
        legend=tuple((SIGNS[verdict][0], verdict) for verdict in SIGNS if any(r.verdict == verdict for r in records)),
        stories={_key(*place): _story(own, head["again"]) for place, own in cells.items()},
        variants=tuple(dict.fromkeys(each.variant for each in travelled.worst(records))),
        traffic=_traffic(records, layouts),
        errors=_errors(records),
        reasons=tuple(unjudged.lines(records, whole=True)),
        not_run=tuple((each["id"], each["not_run"]) for each in report.requirements if each["not_run"]),
    )


def _key(requirement: str, layout: str) -> str:
    return f"{requirement} {layout}"


def _cell(requirement: str, layout: str, records: Sequence[Record]) -> Cell | None:
    if not records:
        return None
    count: Counter[Verdict] = Counter()
    for record in records:
        count[record.verdict] += record.cases
    verdict, all_, judged = overall(count), count.total(), sum(count[each] for each in JUDGED)
    failing = sum(count[each] for each in FAILING)
    note = str(failing) if failing else f"{max(1, 100 * judged // all_)}%" if 0 < judged < all_ else ""
    told = ", ".join(f"{cases} {each}" for each, cases in count.items())
    return Cell(
        _key(requirement, layout), verdict, SIGNS[verdict][0], note, f"{requirement} on {layout}: {verdict}; {told}"
    )


def _story(records: Sequence[Record], again: str) -> list[dict[str, Any]]:
    """Return a cell's cases, those of one variant, verdict and message together; what fails comes first."""
    groups: dict[tuple[str, Verdict, str], list[Record]] = {}
    for record in records:
        message = record.message if record.verdict != "pass" else ""
        groups.setdefault((record.variant or "", record.verdict, message), []).append(record)
    order = sorted(groups.items(), key=lambda group: group[0][1] not in FAILING)
    return [_group(*group, again, full=number < _IN_FULL) for number, group in enumerate(order)]


def _group(key: tuple[str, Verdict, str], records: Sequence[Record], again: str, *, full: bool) -> dict[str, Any]:
    (variant, verdict, message), first = key, records[0]
    told: dict[str, Any] = {"variant": variant, "verdict": verdict, "cases": sum(each.cases for each in records)}
    if message:
        told["message"] = message
    if verdict in JUDGED:
        compared = [each.compared for each in records]
        told["compared"] = {name: sum(each[name] for each in compared) for name in ("elements", "pairs")}
        told["worst"] = max(each.worst for each in records)
        told["workloads"] = sorted({each.workload for each in records if each.workload})
    if verdict in FAILING:
        told |= {"blamed": list(first.blamed), "stage": first.stage or "", "reproduce": first.reproduce(again)}
        if full and first.detail:
            told["detail"] = first.detail
    return told


def _totals(records: Iterable[Record]) -> tuple[tuple[Verdict, int], ...]:
    count: Counter[Verdict] = Counter()
    for record in records:
        count[record.verdict] += record.cases
    order = sorted(SIGNS, key=lambda verdict: verdict not in FAILING)
    return tuple((verdict, count[verdict]) for verdict in order if count[verdict])


def _judged(head: Mapping[str, Any], records: Iterable[Record], all_: int) -> tuple[int, int, int]:
    found = {each for record in records if record.verdict in JUDGED for each in record.requirements}
    asked = set(head["only"]) or {each for record in records for each in record.requirements}
    return len(found & asked), len(asked), all_


def _traffic(records: Sequence[Record], layouts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = {(each.variant, each.layout): each for each in travelled.worst(records)}
    variants = tuple(dict.fromkeys(variant for variant, _ in found))
    lines = []
    for layout in layouts:
        if any(at == layout for _, at in found):
            told = [found.get((variant, layout)) for variant in variants]
            lines.append((layout, tuple(_moved(each) if each else "" for each in told)))
    return tuple(lines)


def _moved(each: travelled.Worst) -> str:
    return f"{each.ratio:.2f} rows, {each.bytes / each.least_bytes:.2f} bytes, {each.calls:g} calls"


def _errors(records: Iterable[Record]) -> tuple[Errors, ...]:
    """Return for each dtype how near the errors of what passed came to their bounds."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.verdict == "pass" and record.worst > 0:
            dtype = next((name for name in _DTYPES if name in (record.workload or "")), "float32")
            found.setdefault(dtype, []).append(record)
    told = []
    for dtype in _DTYPES:
        if own := found.get(dtype):
            tenths = Counter(min(int(10 * record.worst), 9) for record in own)
            largest = max(own, key=lambda record: record.worst)
            told.append(Errors(dtype, tuple(tenths[n] for n in range(10)), largest.worst, largest.item))
    return tuple(told)
