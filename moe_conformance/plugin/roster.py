"""All selected items by name, so that one that never ends is reported as not run, or as lost with its worker.

xdist's controller collects nothing itself: its first worker writes the roster to a file, with the places of which the
run has only a part.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_conformance.plugin import agenda
from moe_conformance.plugin.case_items import checks_of_items
from moe_conformance.plugin.trial import check_and_requirements
from moe_conformance.report.records import Record
from moe_conformance.report.standing import Place
from moe_conformance.workloads.records.told import told

Roster = dict[str, Record]  # by node id

_FIRST = "gw0"


def roster(items: Iterable[pytest.Item]) -> Roster:
    """Return a record for every check among the items and in their cases, with its names and the verdict "not run"."""
    checks = (item for item in checks_of_items(items) if item.get_closest_marker("requirement") is not None)
    return {item.nodeid: _entry(item) for item in checks}


def running(held: Roster, item: str, ended: Collection[str]) -> Record | None:
    """Return the check that an xdist worker ran when it ended, given the item's node id and what had ended before.

    An item of a case has the case's id in brackets, and is no check itself: it runs them in their order.
    """
    if item in held:
        return held[item]
    case = item.rpartition("[")[2].removesuffix("]")
    return next((entry for node, entry in held.items() if entry.case == case and node not in ended), None)


def lost(entry: Record) -> Record:
    """Return the record of an item with which an xdist worker ended."""
    message = (
        "the pytest-xdist worker ended while it ran this item: it was killed, or something ended its process; run the "
        "item alone to see"
    )
    return replace(entry, verdict="error", message=message, kind="WorkerLost")


def hand_over(workerinput: Mapping[str, Any], items: Iterable[pytest.Item], in_part: Collection[Place]) -> None:
    """Write the roster for the controller; only the first worker does, since all collect the same items.

    Args:
        workerinput: Of the worker.
        items: The selected items.
        in_part: The places of which some items were not selected.
    """
    if workerinput["workerid"] != _FIRST:
        return
    path = _path(workerinput)
    draft = path.with_suffix(f".{os.getpid()}")
    content = {"items": [entry.to_json() for entry in roster(items).values()], "in_part": sorted(in_part)}
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def take(workerinput: Mapping[str, Any]) -> tuple[Roster, set[Place]] | None:
    """Return what the first worker wrote, once; None for another worker, or one on another machine."""
    path = _path(workerinput)
    if workerinput["workerid"] != _FIRST or not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    entries = [Record.from_json(entry) for entry in content["items"]]
    in_part: set[Place] = {(requirement, variant, layout) for requirement, variant, layout in content["in_part"]}
    return {entry.node: entry for entry in entries}, in_part


def _path(workerinput: Mapping[str, Any]) -> Path:
    return Path(tempfile.gettempdir()) / f"moe-conformance-{workerinput['testrunuid']}.json"


def _entry(item: pytest.Item) -> Record:
    case, cell = agenda.case_of(item), agenda.cell_of(item)
    check, requirements = check_and_requirements(item)
    return Record(
        node=item.nodeid,
        check=check,
        requirements=requirements,
        verdict="not run",
        variant=cell.variant if cell else None,
        layout=cell.layout.name if cell else None,
        workload=case.workload.name if case else None,
        traits=told(case.workload) if case else (),
    )
