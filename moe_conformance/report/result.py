"""Writes and reads result.json: all results of a run, with a line for every requirement, whether it ran or not.

`result.schema.json` in this folder is its JSON Schema. A change of the format increases `SCHEMA` here and there.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_conformance import reading, waiving
from moe_conformance.report import drawn, folding, journal, not_run, travelled
from moe_conformance.report.records import Record, other_bits, overall
from moe_conformance.spec import Requirement
from moe_conformance.waiving import Waiver
from moe_conformance.workloads.selection import shards

NAME = "result.json"
SCHEMA = 3  # version of the format
UNFINISHED = "the run did not end: it was killed, or is still running"

_WITH_REASON = ("refused", "not adapted", "limit", "not applicable")


class NoReport(Exception):
    """There is no report, or it cannot be read; one sentence."""


@dataclass(frozen=True)
class Report:
    """A report that was read: its head, its records, and the line of each requirement."""

    folder: Path
    head: Mapping[str, Any]
    records: tuple[Record, ...]
    requirements: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Facts:
    """What a run was, and how it ended."""

    backend: str  # as given
    versions: Mapping[str, str]
    device: str
    ranks: int
    profile: str
    plant: str
    command: str
    again: str  # the command that repeats the run, without options that select a part: see `Record.reproduce`
    started: datetime
    finished: datetime | None = None  # None until it ended
    exit: int | None = None
    cases: int = 0
    problems: tuple[str, ...] = ()  # what fails the run in addition to its items
    interrupted: bool = True
    stopped: str = UNFINISHED  # why it was interrupted; "" if it was not
    strict: bool = False  # a SHOULD that is not kept fails
    filtered: bool = False  # only a part was requested; a shard is not such a part
    only: tuple[str, ...] = ()  # the requested requirements; all if empty
    shard: str = ""  # I/N
    left_out: Mapping[str, Any] = field(default_factory=dict)  # to other shards: cells by name, number of cases
    waivers: tuple[Waiver, ...] = ()
    variants: tuple[str, ...] = ()  # all of the backend
    single_rank: bool = False  # the backend says that it has no expert parallelism

    @property
    def seconds(self) -> float:
        """Its duration; 0 before it ended."""
        return 0.0 if self.finished is None else (self.finished - self.started).total_seconds()


def head(facts: Facts) -> dict[str, Any]:
    """Return the head of the report: all but its requirements and records, as plain data."""
    return {
        "schema": SCHEMA,
        "suite": version("moe-conformance"),
        "backend": facts.backend,
        "versions": dict(facts.versions),
        "variants": list(facts.variants),
        "single_rank": facts.single_rank,
        "device": facts.device,
        "ranks": facts.ranks,
        "profile": facts.profile,
        "plant": facts.plant or None,
        "torch": version("torch"),
        "python": sys.version.split()[0],
        "command": facts.command,
        "again": facts.again,
        "started": facts.started.isoformat(timespec="seconds"),
        "finished": facts.finished.isoformat(timespec="seconds") if facts.finished else None,
        "seconds": round(facts.seconds, 3),
        "cases": facts.cases,
        "exit": facts.exit,
        "interrupted": facts.interrupted,
        "stopped": facts.stopped or None,
        "problems": list(facts.problems),
        "strict": facts.strict,
        "filtered": facts.filtered,
        "only": list(facts.only),
        "shard": facts.shard or None,
        "left_out": dict(facts.left_out),
        "waivers": [_plain(waiver) for waiver in facts.waivers],
    }


def document(head: Mapping[str, Any], spec: Iterable[Requirement], records: Sequence[Record]) -> dict[str, Any]:
    """Return the whole report as plain data.

    Args:
        head: See `head`.
        spec: All requirements; each has its line, judged or not.
        records: Of all selected items.
    """
    judged = [record for record in records if record.verdict != "not run"]
    records = [*judged, *not_run.folded(record for record in records if record.verdict == "not run")]
    citing: dict[str, list[Record]] = {}
    for record in records:
        for requirement in record.requirements:
            citing.setdefault(requirement, []).append(record)
    worst = [vars(case) | {"ratio": case.ratio} for case in travelled.worst(records)]
    return {
        **head,
        "drawn": drawn.totals(records),
        "travelled": worst,
        "requirements": [_requirement(requirement, head, citing.get(requirement.id, [])) for requirement in spec],
        **folding.fold(records),
    }


def _requirement(requirement: Requirement, head: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return the line of a requirement, given the records that cite it."""
    cases: Counter[str] = Counter()
    reasons: dict[str, Counter[str]] = {}
    compared: Counter[str] = Counter()
    for record in records:
        cases[record.verdict] += record.cases
        if record.verdict in _WITH_REASON:
            reasons.setdefault(record.verdict, Counter())[record.message] += record.cases
        compared.update({name: record.compared[name] for name in ("elements", "pairs")})
    worst = max(records, key=lambda record: record.worst, default=None)
    return {
        "id": requirement.id,
        "chapter": requirement.chapter,
        "level": requirement.level,
        "profile": requirement.profile,
        "sentence": requirement.sentence,
        "verdict": overall(record.verdict for record in records),
        "not_run": not_run.reasons(requirement, head, records) or None,
        "cases": dict(cases),
        "reasons": {verdict: dict(count) for verdict, count in reasons.items()},
        "compared": {"elements": compared["elements"], "pairs": compared["pairs"]},
        "bits": other_bits(records),
        "worst": worst.worst if worst else 0.0,
        "worst_at": worst.item if worst and worst.worst else None,
    }


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write result.json atomically, and return its path.

    Every requirement and every entry is one line.
    """
    path, draft = folder / NAME, folder / f".{NAME}-{os.getpid()}"
    try:
        draft.write_text("{\n" + ",\n".join(_lines(content)) + "\n}\n", encoding="utf-8")
        draft.replace(path)
    except OSError:  # a full disk: what was there before is still there
        draft.unlink(missing_ok=True)
        raise
    return path


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield every member of the document; lists of lists and dicts have one element per line."""
    for name, value in content.items():
        if isinstance(value, list) and value and not isinstance(value[0], (str, int, float)):
            value = "[\n" + ",\n".join(_dumped(element) for element in value) + "\n]"
        else:
            value = _dumped(value)
        yield f"{_dumped(name)}: {value}"


def _dumped(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read(folder: Path) -> Report:
    """Return the report in a folder; of a run that was killed, its records until then.

    Raises:
        NoReport: there is none, it cannot be read, or it has another format.
    """
    if not (folder / NAME).is_file():
        raise NoReport(f"there is no report in {folder}: {folder / NAME} is missing")
    try:
        head = reading.json_of(folder / NAME)
        if not isinstance(head, dict):
            raise ValueError("it is no object")
        _require_schema(folder, head)
        if wrong := reading.mismatch(head, _schema()):
            raise ValueError(wrong)
        content = {name: head.pop(name) for name in ("requirements", "records", *folding.TABLES)}
        _require_head(head)
        records = journal.read(folder) if head["finished"] is None else folding.unfold(content)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoReport(f"{folder} holds no report of this suite: {error}") from error
    return Report(folder, head, tuple(records), tuple(content["requirements"]))


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.schema.json").read_text(encoding="utf-8"))
    return found


def _require_schema(folder: Path, head: Mapping[str, Any]) -> None:
    """Raise NoReport if the report has another format than this suite writes."""
    found = head.get("schema", 1 if "requirements" in head else None)
    if found is not None and found != SCHEMA:
        raise NoReport(
            f"{folder} holds a report of format {found}, and this suite reads format {SCHEMA}: run again, or read it "
            f"with moe-conformance {head.get('suite', 'of the version that wrote it')}"
        )


def _require_head(head: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError unless the shard, the waivers and the dates of a head can be read."""
    for name in ("started", "finished"):
        if head[name] is not None:
            datetime.fromisoformat(head[name])
    if head["shard"]:
        shards.parse(head["shard"])
    for entry in head["waivers"]:
        waiver_of(entry)


def waiver_of(entry: Mapping[str, Any]) -> Waiver:
    """Return the waiver that a head holds as plain data.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    return waiving.waiver_of({**entry, "expires": date.fromisoformat(entry["expires"])})


def _plain(waiver: Waiver) -> dict[str, Any]:
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(waiver).items()}
    return values | {"expires": waiver.expires.isoformat(), "failure": [asdict(fault) for fault in waiver.failure]}
