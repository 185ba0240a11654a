"""Counts what was selected and not run: the cases of each check in each cell, and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_conformance.report.records import Record
from moe_conformance.spec import Requirement
from moe_conformance.spec.places import checked
from moe_conformance.workloads.plan import SMOKE


def folded(records: Iterable[Record]) -> list[Record]:
    """Return one record for all cases of a check in a cell that were not run for the same reason.

    It has the number of cases, and neither a workload nor what depends on one; its node names the cell. Folding folded
    records changes nothing, so that merged reports can be folded again.
    """
    cases: Counter[tuple[Any, ...]] = Counter()
    first: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (place(record), record.check, record.requirements, record.message)
        first.setdefault(key, record)
        cases[key] += record.cases
    return [replace(record, node=key[0], workload=None, traits=(), cases=cases[key]) for key, record in first.items()]


def place(record: Record) -> str:
    """Return the node without its workload: `a.py::test_x[alltoall-ep2]`; without brackets if there is no cell."""
    check = record.node[: -len(record.item)] + record.item.partition("[")[0]
    cell = "-".join(part for part in (record.variant, record.layout) if part)
    return f"{check}[{cell}]" if cell else check


def reasons(requirement: Requirement, head: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Return why a requirement was not judged, or not on all cases; "" if it was judged on all that were selected.

    Args:
        requirement: The requirement.
        head: Of the report.
        records: Those that cite the requirement.
    """
    if requirement.id not in checked():
        return "there is no check yet" + (f": {requirement.without_check}" if requirement.without_check else "")
    if head["only"] and requirement.id not in head["only"]:
        return "left out by --only"
    cases: Counter[str] = Counter()
    for record in records:
        if record.verdict == "not run":
            cases[record.message or "not run"] += record.cases
    if cases:
        return "; ".join(f"{count} cases: {why}" for why, count in cases.items())
    return "" if records else _unselected(requirement, head)


def _unselected(requirement: Requirement, head: Mapping[str, Any]) -> str:
    """Return why no case of a requirement was selected."""
    if head["stopped"]:
        return f"not selected yet: {head['stopped']}"
    if head["shard"]:
        return "all of its cases are in other shards"
    if head["filtered"] and head["profile"] != SMOKE:
        return "left out by -k, -m or the paths that were given"
    if requirement.profile != "quick" and requirement.profile != head["profile"]:
        return f"its cases belong to the profile {requirement.profile}"
    return f"it has no case in the profile {head['profile']}"
