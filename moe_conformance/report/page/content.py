"""The content of the page as plain data: totals, the matrix with its cells' stories, traffic, errors, reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_conformance import spec
from moe_conformance.chapters.training.parity import QUANTITIES
from moe_conformance.report import own_word, parity, travelled, unjudged, words
from moe_conformance.report.matrix import SIGNS
from moe_conformance.report.records import FAILING, Record, Verdict, overall
from moe_conformance.report.result import Report
from moe_conformance.report.standing import JUDGED
from moe_conformance.workloads.scripts import layout_names

_IN_FULL = 5  # failures of a cell that are shown with their detail
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Cell:
    """A requirement on a layout: the result of all its cases."""

    key: str  # of its story
    verdict: Verdict
    sign: str
    note: str  # the number that failed, or the percentage that was judged
    label: str  # all of it in words


@dataclass(frozen=True)
class Row:
    """A requirement with its cells by layout; None if it has no case."""

    id: str
    chapter: str
    level: str
    sentence: str
    verdict: Verdict
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Errors:
    """Observed/allowed errors of one dtype: the number of checks in each tenth, and the largest."""

    dtype: str
    tenths: tuple[int, ...]
    worst: float
    item: str


@dataclass(frozen=True)
class Content:
    """The content of the page."""

    head: Mapping[str, Any]
    title: str
    verdict: str  # passed, failed, stopped
    share: int  # percent of what it was asked that was judged, see `own_word`
    excluded: str  # by the adapter's own word; "" if nothing is
    totals: tuple[tuple[Verdict, int], ...]
    judged: tuple[int, int, int]  # requirements: judged, requested, of the spec
    failures: tuple[tuple[str, str], ...]  # title and text, as in the terminal
    layouts: tuple[str, ...]
    chapters: tuple[str, ...]
    rows: tuple[Row, ...]
    legend: tuple[tuple[str, Verdict], ...]
    stories: Mapping[str, Sequence[Mapping[str, Any]]]
    variants: tuple[str, ...]
    traffic: tuple[tuple[str, tuple[str, ...]], ...]  # by layout, for each variant
    errors: tuple[Errors, ...]
    parity: tuple[tuple[str, tuple[str, ...]], ...]  # by layout, for each quantity of a training step
    quantities: tuple[str, ...]
    reasons: tuple[str, ...]
    not_run: tuple[tuple[str, str], ...]


def content(report: Report) -> Content:
    """Return the content of the page of a report."""
    head, records = report.head, report.records
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        for requirement in record.requirements:
            cells.setdefault((requirement, record.layout or "any"), []).append(record)
    used = {layout for _, layout in cells}
    layouts = tuple(layout for layout in (*layout_names(), "any") if layout in used)
    rows = tuple(_rows(cells, layouts))
    found, found_word = words.groups(records), own_word.own_word(records)
    return Content(
        head=head,
        title=f"native with the planted bug {head['plant']}" if head["plant"] else head["backend"],
        verdict="stopped" if head["stopped"] else "passed" if head["exit"] == 0 else "failed",
        share=found_word.share,
        excluded=found_word.sentence,
        totals=_totals(records),
        judged=_judged(head, records, len(spec.load())),
        failures=tuple(words.texts(found, head["again"])),
        layouts=layouts,
        chapters=tuple(dict.fromkeys(row.chapter for row in rows)),
        rows=rows,
        legend=tuple((SIGNS[verdict][0], verdict) for verdict in SIGNS if any(r.verdict == verdict for r in records)),
        stories={_key(*place): _story(of_place, head["again"]) for place, of_place in cells.items()},
        variants=tuple(dict.fromkeys(worst.variant for worst in travelled.worst(records))),
        traffic=_traffic(records, layouts),
        errors=_errors(records),
        parity=tuple((name, tuple(cells)) for name, cells in parity.of_records(records)),
        quantities=QUANTITIES,
        reasons=tuple(unjudged.lines(records, whole=True)),
        not_run=tuple((line["id"], line["not_run"]) for line in report.requirements if line["not_run"]),
    )


def _rows(cells: Mapping[tuple[str, str], Sequence[Record]], layouts: Sequence[str]) -> Iterator[Row]:
    for id, requirement in spec.load().items():
        by_layout = {layout: cells.get((id, layout), ()) for layout in layouts}
        of_requirement = [record for records in by_layout.values() for record in records]
        if of_requirement:
            yield Row(
                id,
                requirement.chapter,
                requirement.level,
                requirement.sentence,
                overall(record.verdict for record in of_requirement),
                tuple(_cell(id, layout, records) for layout, records in by_layout.items()),
            )


def _key(requirement: str, layout: str) -> str:
    return f"{requirement} {layout}"


def _cell(requirement: str, layout: str, records: Sequence[Record]) -> Cell | None:
    if not records:
        return None
    count = _count(records)
    all_ = count.total()
    judged, failing = (sum(count[verdict] for verdict in verdicts) for verdicts in (JUDGED, FAILING))
    note = str(failing) if failing else f"{max(1, 100 * judged // all_)}%" if 0 < judged < all_ else ""
    counts = ", ".join(f"{cases} {verdict}" for verdict, cases in count.items())
    of_cell = overall(count)
    label = f"{requirement} on {layout}: {of_cell}; {counts}"
    return Cell(_key(requirement, layout), of_cell, SIGNS[of_cell][0], note, label)


def _story(records: Sequence[Record], again: str) -> list[dict[str, Any]]:
    """Return a cell's cases, grouped by variant, verdict and message; failing ones come first."""
    groups: dict[tuple[str, Verdict, str], list[Record]] = {}
    for record in records:
        message = record.message if record.verdict != "pass" else ""
        groups.setdefault((record.variant or "", record.verdict, message), []).append(record)
    order = sorted(groups.items(), key=lambda group: group[0][1] not in FAILING)
    return [_group(*group, again, full=number < _IN_FULL) for number, group in enumerate(order)]


def _group(key: tuple[str, Verdict, str], records: Sequence[Record], again: str, *, full: bool) -> dict[str, Any]:
    (variant, verdict, message), first = key, records[0]
    story: dict[str, Any] = {"variant": variant, "verdict": verdict, "cases": sum(record.cases for record in records)}
    if message:
        story["message"] = message
    if verdict in JUDGED:
        compared = [record.compared for record in records]
        story["compared"] = {name: sum(counts[name] for counts in compared) for name in ("elements", "pairs")}
        story["worst"] = max(record.worst for record in records)
        story["workloads"] = sorted({record.workload for record in records if record.workload})
    if verdict in FAILING:
        story |= {"blamed": list(first.blamed), "stage": first.stage or "", "reproduce": first.reproduce(again)}
        if full and first.detail:
            story["detail"] = first.detail
    return story


def _count(records: Iterable[Record]) -> Counter[Verdict]:
    count: Counter[Verdict] = Counter()
    for record in records:
        count[record.verdict] += record.cases
    return count


def _totals(records: Iterable[Record]) -> tuple[tuple[Verdict, int], ...]:
    count = _count(records)
    order = sorted(SIGNS, key=lambda verdict: verdict not in FAILING)
    return tuple((verdict, count[verdict]) for verdict in order if count[verdict])


def _judged(head: Mapping[str, Any], records: Iterable[Record], all_: int) -> tuple[int, int, int]:
    found = {requirement for record in records if record.verdict in JUDGED for requirement in record.requirements}
    requested = set(head["only"]) or {requirement for record in records for requirement in record.requirements}
    return len(found & requested), len(requested), all_


def _traffic(records: Sequence[Record], layouts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = {(worst.variant, worst.layout): worst for worst in travelled.worst(records)}
    variants = tuple(dict.fromkeys(variant for variant, _ in found))
    lines = []
    for layout in layouts:
        if any(at == layout for _, at in found):
            of_layout = [found.get((variant, layout)) for variant in variants]
            lines.append((layout, tuple(_traffic_words(worst) if worst else "" for worst in of_layout)))
    return tuple(lines)


def _traffic_words(worst: travelled.Worst) -> str:
    return f"{worst.ratio:.2f} rows, {worst.bytes / worst.least_bytes:.2f} bytes, {worst.calls:g} calls"


def _errors(records: Iterable[Record]) -> tuple[Errors, ...]:
    """Return for each dtype the observed/allowed errors of checks that passed."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.verdict == "pass" and record.worst > 0:
            dtype = next((name for name in _DTYPES if name in (record.workload or "")), "float32")
            found.setdefault(dtype, []).append(record)
    errors = []
    for dtype in _DTYPES:
        if of_dtype := found.get(dtype):
            tenths = Counter(min(int(10 * record.worst), 9) for record in of_dtype)
            largest = max(of_dtype, key=lambda record: record.worst)
            errors.append(Errors(dtype, tuple(tenths[n] for n in range(10)), largest.worst, largest.item))
    return tuple(errors)
