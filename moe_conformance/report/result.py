"""result.json: everything that a run decided, every requirement of the law included, run or not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_conformance.report import drawn, travelled
from moe_conformance.report.records import Record, overall
from moe_conformance.spec import Requirement
from moe_conformance.spec.places import checked
from moe_conformance.waivers import Waiver

NAME = "result.json"
UNFINISHED = "it did not come to its end: it was killed, or it still runs"


@dataclass(frozen=True)
class Facts:
    """What a run was, and how it ended as a whole."""

    backend: str  # as asked for
    versions: Mapping[str, str]
    device: str
    ranks: int
    profile: str
    plant: str
    command: str
    started: datetime
    finished: datetime | None = None  # None until it ended
    exit: int | None = None
    cases: int = 0
    problems: tuple[str, ...] = ()  # what fails the run beside its items
    interrupted: bool = True
    stopped: str = UNFINISHED  # why it was interrupted; "" if it was not
    filtered: bool = False  # less than everything of this backend and profile was asked for, other shards aside
    only: tuple[str, ...] = ()  # the requirements that were asked for; all if empty
    shard: str = ""  # I/N
    left_out: Mapping[str, Any] = field(default_factory=dict)  # to other shards: cells by name, number of cases
    waivers: tuple[Waiver, ...] = ()
    variants: tuple[str, ...] = ()  # all that the backend has

    @property
    def seconds(self) -> float:
        """From the start to the end."""
        return 0.0 if self.finished is None else (self.finished - self.started).total_seconds()


def head(facts: Facts) -> dict[str, Any]:
    """Return the report without its requirements, as plain data."""
    return {
        "suite": version("moe-conformance"),
        "backend": facts.backend,
        "versions": dict(facts.versions),
        "variants": list(facts.variants),
        "device": facts.device,
        "ranks": facts.ranks,
        "profile": facts.profile,
        "plant": facts.plant or None,
        "torch": version("torch"),
        "python": sys.version.split()[0],
        "command": facts.command,
        "started": facts.started.isoformat(timespec="seconds"),
        "finished": facts.finished.isoformat(timespec="seconds") if facts.finished else None,
        "seconds": round(facts.seconds, 3),
        "cases": facts.cases,
        "exit": facts.exit,
        "interrupted": facts.interrupted,
        "stopped": facts.stopped or None,
        "problems": list(facts.problems),
        "filtered": facts.filtered,
        "only": list(facts.only),
        "shard": facts.shard or None,
        "left_out": dict(facts.left_out),
        "waivers": [asdict(waiver) | {"expires": waiver.expires.isoformat()} for waiver in facts.waivers],
    }


def document(head: Mapping[str, Any], law: Sequence[Requirement], records: Sequence[Record]) -> dict[str, Any]:
    """Return the whole report as plain data."""
    requirements = [_requirement(requirement, records) for requirement in law]
    worst = [asdict(each) | {"ratio": each.ratio} for each in travelled.worst(records)]
    return {**head, "drawn": drawn.totals(records), "travelled": worst, "requirements": requirements}


def _requirement(requirement: Requirement, records: Sequence[Record]) -> dict[str, Any]:
    own = [record for record in records if requirement.id in record.requirements]
    return {
        "id": requirement.id,
        "chapter": requirement.chapter,
        "level": requirement.level,
        "profile": requirement.profile,
        "sentence": requirement.sentence,
        "has_check": requirement.id in checked(),
        "verdict": overall(record.verdict for record in own),
        "worst": max((record.worst for record in own), default=0.0),
        "checks": [record.to_json() for record in own],
    }


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write result.json whole or not at all, and return its path."""
    path, draft = folder / NAME, folder / f".{NAME}-{os.getpid()}"
    draft.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
