"""result.json: everything that a run decided, every requirement of the law included, run or not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_conformance.report.records import Record, overall
from moe_conformance.spec import Requirement

NAME = "result.json"


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
    finished: datetime
    exit: int
    cases: int
    problems: tuple[str, ...]  # what fails the run beside its items
    interrupted: bool

    @property
    def seconds(self) -> float:
        """From the start to the end."""
        return (self.finished - self.started).total_seconds()


def document(facts: Facts, law: Sequence[Requirement], records: Sequence[Record]) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "suite": version("moe-conformance"),
        "backend": facts.backend,
        "versions": dict(facts.versions),
        "device": facts.device,
        "ranks": facts.ranks,
        "profile": facts.profile,
        "plant": facts.plant or None,
        "torch": version("torch"),
        "python": sys.version.split()[0],
        "command": facts.command,
        "started": facts.started.isoformat(timespec="seconds"),
        "finished": facts.finished.isoformat(timespec="seconds"),
        "seconds": round(facts.seconds, 3),
        "cases": facts.cases,
        "exit": facts.exit,
        "interrupted": facts.interrupted,
        "problems": list(facts.problems),
        "requirements": [_requirement(requirement, records) for requirement in law],
    }


def _requirement(requirement: Requirement, records: Sequence[Record]) -> dict[str, Any]:
    own = [record for record in records if requirement.id in record.requirements]
    return {
        "id": requirement.id,
        "chapter": requirement.chapter,
        "level": requirement.level,
        "sentence": requirement.sentence,
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
