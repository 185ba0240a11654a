"""Merges reports of one run: its shards, or a run that was stopped and the one that continued it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_conformance.report import comparison, floor, floor_file, not_run, result
from moe_conformance.report.problems import of_whole
from moe_conformance.report.records import FAILING, Record, overall
from moe_conformance.report.result import Report
from moe_conformance.report.standing import standings
from moe_conformance.waiving import Waivers
from moe_conformance.workloads.selection import shards

# What two reports must have in common to be of one run.
_SAME = ("suite", "backend", "versions", "torch", "device", "ranks", "profile", "plant", "strict", "only")

_SOME = 5  # duplicates and contradictions that are listed


class Unmergeable(Exception):
    """A folder has no report, or the reports are not of one run; one sentence."""


@dataclass(frozen=True)
class Merged:
    """The merged report, and notes on the merge."""

    head: dict[str, Any]
    records: tuple[Record, ...]
    notes: tuple[str, ...]


def read(folder: Path) -> Report:
    """Return the report in a folder; of a run that was killed, its records until then.

    Raises:
        Unmergeable: there is none, it cannot be read, or it was merged already.
    """
    try:
        report = result.read(folder)
    except result.NoReport as error:
        raise Unmergeable(str(error)) from error
    if report.head.get("merged"):
        raise Unmergeable(f"{folder} was merged already; merge the reports that it came from")
    return report


def of_one_backend(parts: Sequence[Report]) -> None:
    """Require that reports, of whatever profiles, judged the same backend with the same planted bug, or none.

    Raises:
        Unmergeable: they did not.
    """
    for part in parts[1:]:
        _require_same(parts[0], part, ("backend", "plant"), "of one backend")


def merge(parts: Sequence[Report], command: str, against: Report | None = None) -> Merged:
    """Return the merged report, held to the same as one run.

    Args:
        parts: The reports.
        command: By which they are merged.
        against: A report of an earlier run, of which nothing may be lost.

    Raises:
        Unmergeable: the parts differ in what was judged, or in the number of shards; the floor cannot be read.
    """
    for part in parts[1:]:
        _require_same(parts[0], part)
        _require_alike(parts[0], part)
    notes: list[str] = []
    conflicts: list[str] = []
    records = _union(parts, notes, conflicts)
    missing = _missing(parts)
    open_parts = [part for part in parts if part.head["interrupted"] and not _superseded(part, parts, records)]
    problems = list(dict.fromkeys(problem for part in parts for problem in part.head["problems"]))
    problems += [f"{shard} is missing" for shard in missing] + conflicts
    if not (missing or open_parts):
        problems = _of_whole(parts, records, against, problems)
    fails = bool(problems or open_parts) or any(record.verdict in FAILING for record in records)
    finished = [part.head["finished"] for part in parts if part.head["finished"]]
    head = {
        **parts[0].head,
        "command": command,
        "started": min(part.head["started"] for part in parts),
        "finished": max(finished, default=None),
        "seconds": round(sum(part.head["seconds"] for part in parts), 3),
        "cases": sum(record.runs for record in records),
        "exit": int(fails),
        "interrupted": bool(open_parts),
        "stopped": "; ".join(f"{part.folder}: {part.head['stopped']}" for part in open_parts) or None,
        "problems": problems,
        "shard": None,
        "left_out": {"cells": [], "cases": 0},
        "merged": [str(part.folder) for part in parts],
    }
    return Merged(head, tuple(records), tuple(notes))


def _of_whole(
    parts: Sequence[Report], records: Sequence[Record], against: Report | None, of_parts: Sequence[str]
) -> list[str]:
    """Return what fails the whole in addition to its items.

    That is what `problems` finds in it, and what is below the floor and worse than the earlier report in it; and the
    problems of the parts, but for those that it has in their place.
    """
    head = parts[0].head
    held, strict = Waivers(None, tuple(result.waiver_of(entry) for entry in head["waivers"])), head["strict"]
    filtered, full = any(part.head["filtered"] for part in parts), head["profile"] == "full"
    lowest = _floor(head)
    # A report that does not say whether it has a single rank is of a suite that did not ask.
    spread = head["ranks"] > 1 and lowest is None and not head.get("single_rank", True)
    found = list(of_whole(records, held, filtered=filtered, full=full, strict=strict, spread=spread))
    stands, replaced = standings(records), []
    if lowest is not None and _is_whole(parts):
        same = lowest.profile == head["profile"]
        found += lowest.sentences(stands, lowest.places if same else stands)
        replaced.append(floor.BELOW)
    if against is not None:
        whole = _is_whole(parts) and head["ranks"] >= against.head["ranks"]
        counts = _is_whole(parts) and head["profile"] == against.head["profile"]
        compared = comparison.compare(standings(against.records), stands, whole=whole, counts=counts)
        found += filter(None, [compared.sentence(against.folder)])
        replaced.append(comparison.WORSE)
    return [*(problem for problem in of_parts if not problem.startswith(tuple(replaced))), *found]


def _is_whole(parts: Sequence[Report]) -> bool:
    """Whether the parts have all that there is: of each shard one that was not narrowed, nothing being left open."""
    narrowed: dict[str | None, bool] = {}
    for part in parts:
        shard = part.head["shard"]
        narrowed[shard] = narrowed.get(shard, True) and part.head["filtered"]
    return not any(narrowed.values())


def _floor(head: Mapping[str, Any]) -> floor.Floor | None:
    """Return the floor to which a run is held, None if there is none."""
    if head["plant"]:
        return None
    try:
        floors = floor_file.of_backend(head["backend"])
    except floor_file.Unreadable as error:
        raise Unmergeable(str(error)) from error
    return floor.chosen(floors, head["versions"], head["device"], head["profile"])


def _require_same(one: Report, other: Report, names: Sequence[str] = _SAME, what: str = "of one run") -> None:
    for name in names:
        mine, its = one.head[name], other.head[name]
        if mine != its:
            raise Unmergeable(
                f"{one.folder} and {other.folder} are not {what}: {name} {_shown(mine)} and {_shown(its)}"
            )


def _require_alike(one: Report, other: Report) -> None:
    mine, its = (part.head["shard"] and shards.parse(part.head["shard"]).count for part in (one, other))
    if mine != its:
        raise Unmergeable(
            f"{one.folder} and {other.folder} are not divided alike: {_division(one.head)} and {_division(other.head)}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name} {version}" for name, version in value.items())
    return str(value)


def _division(head: Mapping[str, Any]) -> str:
    return f"shard {head['shard']}" if head["shard"] else "the whole"


def _union(parts: Sequence[Report], notes: list[str], conflicts: list[str]) -> list[Record]:
    """Return one record per item that ran, the worse of two that differ, and the records of what no part ran."""
    found: dict[str, Record] = {}
    twice: list[str] = []
    differing: list[str] = []
    for part in parts:
        for record in part.records:
            known = record if record.verdict == "not run" else found.setdefault(record.node, record)
            if known is record:
                continue
            twice.append(record.item)
            if known.verdict != record.verdict:
                differing.append(
                    f"{record.item} is {known.verdict} in one report and {record.verdict} in {part.folder}"
                )
                worse = overall((known.verdict, record.verdict))
                found[record.node] = known if known.verdict == worse else record
    if twice:
        notes.append(f"{len(twice)} items were checked more than once: {', '.join(_first(twice))}")
    conflicts += _first(differing)
    return [*found.values(), *_left(parts, found)]


def _left(parts: Sequence[Report], judged: Mapping[str, Record]) -> Iterator[Record]:
    """Yield the records of what parts did not run, minus what other parts ran of the same check in the same cell.

    Parts of one run select from the same cases: what others ran in addition to a part is what that part did not run.
    """
    everywhere = Counter(not_run.place(record) for record in judged.values())
    most: dict[str, Record] = {}
    for part in parts:
        here = Counter(not_run.place(record) for record in part.records if record.verdict != "not run")
        for record in part.records:
            if record.verdict != "not run":
                continue
            at = not_run.place(record)
            left = record.cases - (everywhere[at] - here[at])
            if left > 0 and (at not in most or most[at].cases < left):
                most[at] = replace(record, cases=left)
    yield from most.values()


def _first(sentences: Sequence[str]) -> list[str]:
    more = [f"{len(sentences) - _SOME} more"] if len(sentences) > _SOME else []
    return [*sentences[:_SOME], *more]


def _missing(parts: Sequence[Report]) -> list[str]:
    given = [shards.parse(part.head["shard"]) for part in parts if part.head["shard"]]
    if not given:
        return []
    count = given[0].count
    there = {shard.index for shard in given}
    return [f"shard {index}/{count}" for index in range(1, count + 1) if index not in there]


def _superseded(part: Report, parts: Sequence[Report], records: Sequence[Record]) -> bool:
    """Whether another part judged what an interrupted run did not run."""
    if any(other.head["shard"] == part.head["shard"] and not other.head["interrupted"] for other in parts):
        return True
    # It was killed before it could write what it did not run, or stopped before that was known.
    unknown = part.head["finished"] is None or not part.records
    wanted = {not_run.place(record) for record in part.records if record.verdict == "not run"}
    return not unknown and not any(
        record.verdict == "not run" and not_run.place(record) in wanted for record in records
    )
