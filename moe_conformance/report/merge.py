"""Several reports of one run put together: shards, or a run that was stopped and the one that went on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_args

from moe_conformance import shards
from moe_conformance.plan import VIRTUAL
from moe_conformance.report import journal, result
from moe_conformance.report.problems import of_whole
from moe_conformance.report.records import FAILING, Record, overall
from moe_conformance.waivers import Waiver, Waivers
from moe_conformance.workloads.profiles import Profile

# What every report says of itself, but for what may be null.
_SAID: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("suite", "backend", "torch", "device", "profile", "command", "started"), str),
    **dict.fromkeys(("variants", "problems", "only", "waivers"), list),
    **dict.fromkeys(("interrupted", "filtered"), bool),
    "versions": dict,
    "ranks": int,
    "seconds": (int, float),
}
_OR_NULL = ("plant", "finished", "stopped", "shard")  # strings

# What two reports must have in common to be of one run.
_SAME = ("suite", "backend", "versions", "torch", "device", "ranks", "profile", "plant", "only")

_SOME = 5  # duplicates and contradictions that are told one by one


class Unmergeable(Exception):
    """What was given is no report, or the reports are not of one run; one sentence."""


@dataclass(frozen=True)
class Part:
    """One report: all but its requirements, and its records."""

    folder: Path
    head: Mapping[str, Any]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Merged:
    """The report of the whole, and what is to be said of putting it together."""

    head: dict[str, Any]
    records: tuple[Record, ...]
    notes: tuple[str, ...]


def read(folder: Path) -> Part:
    """Return the report in a folder; of a run that was killed, what it had found by then.

    Raises:
        Unmergeable: there is none, it is not ours, or it was merged already.
    """
    try:
        head = json.loads((folder / result.NAME).read_text(encoding="utf-8"))
        requirements = head.pop("requirements")
        _require_said(head)
        records = journal.read(folder) if head["finished"] is None else _records(requirements)
    except FileNotFoundError as error:
        raise Unmergeable(f"there is no report in {folder}: {error.filename} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unmergeable(f"{folder} holds no report of this suite: {type(error).__name__}: {error}") from error
    if head.get("merged"):
        raise Unmergeable(f"{folder} was merged already; merge the reports that it came from")
    return Part(folder, head, tuple(records))


def of_one_backend(parts: Sequence[Part]) -> None:
    """Require that reports, of whatever profiles, judged the same backend with the same planted bug, or none.

    Raises:
        Unmergeable: they did not.
    """
    for part in parts[1:]:
        _require_same(parts[0], part, ("backend", "plant"), "of one backend")


def merge(parts: Sequence[Part], command: str) -> Merged:
    """Return the report of all.

    Raises:
        Unmergeable: they differ in what was judged, or in how it was divided.
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
        first = parts[0].head
        held = Waivers(None, tuple(_waiver(entry) for entry in first["waivers"]))
        filtered = any(part.head["filtered"] for part in parts)
        problems += of_whole(records, held, filtered=filtered, full=first["profile"] == "full")
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


def _require_said(head: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError unless a report says all of itself, and in ways that can be read."""
    wanted = {**_SAID, **dict.fromkeys(_OR_NULL, (str, type(None)))}
    for name, kind in wanted.items():
        if name not in head:
            raise ValueError(f"it does not say its {name}")
        if not isinstance(head[name], kind):
            raise ValueError(f"its {name} is {head[name]!r}")
    if head["profile"] not in (*get_args(Profile), VIRTUAL):
        raise ValueError(f"its profile is {head['profile']!r}")
    if head["shard"]:
        shards.parse(head["shard"])
    for entry in head["waivers"]:
        _waiver(entry)


def _records(requirements: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return every record once; those that cite several requirements stand with each of them."""
    checks = {check["node"]: check for requirement in requirements for check in requirement["checks"]}
    return [Record.from_json(check) for check in checks.values()]


def _require_same(one: Part, other: Part, names: Sequence[str] = _SAME, what: str = "of one run") -> None:
    for name in names:
        mine, its = one.head[name], other.head[name]
        if mine != its:
            raise Unmergeable(
                f"{one.folder} and {other.folder} are not {what}: {name} {_shown(mine)} and {_shown(its)}"
            )


def _require_alike(one: Part, other: Part) -> None:
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


def _union(parts: Sequence[Part], notes: list[str], conflicts: list[str]) -> list[Record]:
    """Return one record per item: one that ran over one that did not, and the worse of two that differ."""
    found: dict[str, Record] = {}
    twice: list[str] = []
    differing: list[str] = []
    for part in parts:
        for record in part.records:
            known = found.setdefault(record.node, record)
            if known is record or record.verdict == "not run":
                continue
            if known.verdict == "not run":
                found[record.node] = record
                continue
            twice.append(record.item)
            if known.verdict != record.verdict:
                differing.append(
                    f"{record.item} is {known.verdict} in one report and {record.verdict} in {part.folder}"
                )
                worse = overall((known.verdict, record.verdict))
                found[record.node] = known if known.verdict == worse else record
    if twice:
        notes.append(f"{len(twice)} items were judged more than once: {', '.join(_first(twice))}")
    conflicts += _first(differing)
    return list(found.values())


def _first(sentences: Sequence[str]) -> list[str]:
    more = [f"{len(sentences) - _SOME} more"] if len(sentences) > _SOME else []
    return [*sentences[:_SOME], *more]


def _missing(parts: Sequence[Part]) -> list[str]:
    given = [shards.parse(part.head["shard"]) for part in parts if part.head["shard"]]
    if not given:
        return []
    count = given[0].count
    there = {shard.index for shard in given}
    return [f"shard {index}/{count}" for index in range(1, count + 1) if index not in there]


def _superseded(part: Part, parts: Sequence[Part], records: Sequence[Record]) -> bool:
    """Whether what an interrupted run did not come to was judged by another."""
    if any(each.head["shard"] == part.head["shard"] and not each.head["interrupted"] for each in parts):
        return True
    # It was killed before it could say what it did not come to, or stopped before it knew.
    unknown = part.head["finished"] is None or not part.records
    nodes = {record.node for record in part.records}
    return not unknown and not any(record.verdict == "not run" and record.node in nodes for record in records)


def _waiver(entry: Mapping[str, Any]) -> Waiver:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Waiver(**(values | {"expires": date.fromisoformat(entry["expires"])}))
