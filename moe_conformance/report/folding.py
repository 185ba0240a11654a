"""Converts records to the form of result.json, in which shared values are written once, and back.

An *entry* holds the records of one check in one cell that have the same result: their common values, and the
workloads. A field in which the cases of an entry may differ (`_COLUMNS`) is absent if all have its default, one value
if all have the same, else a list with a value for each workload. Long and frequent values are replaced by their index
in *tables*: checks, workloads, texts (messages and details), traits, resolved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from moe_conformance.report.records import Record, Verdict

TABLES = ("checks", "workloads", "texts", "traits", "resolved")

# Of the cases of an entry, with their defaults; numbers, or dicts if rows were sent between ranks. Traits and resolved
# are indices in their tables, of which the first value is empty.
_COLUMNS: Mapping[str, Any] = {
    "elements": 0,
    "pairs": 0,
    "worst": 0.0,
    "of_two_runs": 0,
    "other_bits": 0,
    "runs": 0,
    "traits": 0,
    "resolved": 0,
    "travelled": {},
    "deviations": {},
}

# Of the entry as a whole, in addition to check, requirements, verdict and texts; absent if they have their default.
_COMMON: Mapping[str, Any] = {
    "variant": None,
    "layout": None,
    "kind": None,
    "stage": None,
    "blamed": (),
    "waiver": None,
    "drawn": {},
    "replay": (),
    "cases": 1,
}

_TUPLES = ("blamed", "replay")
_VERDICTS = frozenset(get_args(Verdict))


class _Table:
    """Distinct values in order of their first appearance, numbered from 0."""

    def __init__(self, *first: Any) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        for value in first:
            self.number(value)

    def number(self, value: Any) -> int:
        """Return the number of a value; a new value is added."""
        key = tuple(value.items()) if isinstance(value, Mapping) else value
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self.values)
            self.values.append(value)
        return known


def fold(records: Iterable[Record]) -> dict[str, list[Any]]:
    """Return the tables and the entries ("records") as lists, dicts, strings and numbers.

    The entries come in the order of their first records.
    """
    tables = {name: _Table() for name in TABLES}
    tables["traits"].number(())
    tables["resolved"].number({})
    entries: dict[Hashable, tuple[dict[str, Any], list[Record]]] = {}
    for record in records:
        common = _common(record, tables)
        key = _frozen(common)
        entries.setdefault(key, (common, []))[1].append(record)
    found = [common | _columns(of_entry, tables) for common, of_entry in entries.values()]
    checks = [{"check": check, "node": node} for check, node in tables["checks"].values]
    return {name: table.values for name, table in tables.items()} | {"checks": checks, "records": found}


def _common(record: Record, tables: Mapping[str, _Table]) -> dict[str, Any]:
    item = record.item
    name, bracket, named = item.partition("[")
    node = record.node[: len(record.node) - len(item)] + name
    brackets = named.removesuffix("]") if bracket else None
    entry: dict[str, Any] = {
        "check": tables["checks"].number((record.check, node)),
        "requirements": record.requirements,
        "verdict": record.verdict,
    }
    values = vars(record)
    entry |= {name: values[name] for name, default in _COMMON.items() if values[name] != default}
    if brackets != record.case:
        entry["brackets"] = brackets
    if record.compared["ranks"]:
        entry["ranks"] = tuple(record.compared["ranks"])
    for name in ("message", "detail"):
        if values[name]:
            entry[name] = tables["texts"].number(values[name])
    return entry


def _frozen(common: Mapping[str, Any]) -> Hashable:
    return tuple(
        (name, tuple(value.items()) if isinstance(value, Mapping) else value) for name, value in common.items()
    )


def _columns(records: Sequence[Record], tables: Mapping[str, _Table]) -> dict[str, Any]:
    """Return the workloads of an entry's records, and the columns in which a record differs from the default."""
    columns: dict[str, list[Any]] = {
        "workloads": [
            None if record.workload is None else tables["workloads"].number(record.workload) for record in records
        ],
        "elements": [record.compared["elements"] for record in records],
        "pairs": [record.compared["pairs"] for record in records],
        "worst": [record.worst for record in records],
        "of_two_runs": [record.bits[0] for record in records],
        "other_bits": [record.bits[1] for record in records],
        "runs": [record.runs for record in records],
        "traits": [tables["traits"].number(record.traits) for record in records],
        "resolved": [tables["resolved"].number(record.resolved) for record in records],
        "travelled": [record.travelled for record in records],
        "deviations": [record.deviations for record in records],
    }
    found: dict[str, Any] = {"workloads": columns.pop("workloads")}
    for name, values in columns.items():
        first = values[0]
        if any(value != first for value in values):
            found[name] = values
        elif first != _COLUMNS[name]:
            found[name] = first
    return found


def unfold(content: Mapping[str, Any]) -> list[Record]:
    """Return the records from which `fold` made the content.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError: `fold` did not make it.
    """
    return [record for entry in content["records"] for record in _records(entry, content)]


def _records(entry: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[Record]:
    if entry["verdict"] not in _VERDICTS:
        raise ValueError(f"there is no verdict {entry['verdict']!r}")
    check = tables["checks"][entry["check"]]
    common = {name: entry[name] for name in _COMMON if name in entry}
    common |= {name: tuple(common[name]) for name in _TUPLES if name in common}
    common |= {name: tables["texts"][entry[name]] for name in ("message", "detail") if name in entry}
    common |= {"check": check["check"], "requirements": tuple(entry["requirements"]), "verdict": entry["verdict"]}
    numbers = entry["workloads"]
    values = {name: _spread(entry.get(name, default), len(numbers), name) for name, default in _COLUMNS.items()}
    for at, number in enumerate(numbers):
        workload = None if number is None else tables["workloads"][number]
        case = "-".join(part for part in (common.get("variant"), common.get("layout"), workload) if part) or None
        brackets = entry.get("brackets", case)
        yield Record(
            **common,
            node=check["node"] if brackets is None else f"{check['node']}[{brackets}]",
            workload=workload,
            compared={
                "elements": values["elements"][at],
                "pairs": values["pairs"][at],
                "ranks": list(entry.get("ranks", ())),
            },
            worst=values["worst"][at],
            bits=(values["of_two_runs"][at], values["other_bits"][at]),
            runs=values["runs"][at],
            traits=tuple(tables["traits"][values["traits"][at]]),
            resolved=tables["resolved"][values["resolved"][at]],
            travelled=values["travelled"][at],
            deviations=values["deviations"][at],
        )


def _spread(value: Any, cases: int, name: str) -> Sequence[Any]:
    """Return a value for each case."""
    if not isinstance(value, list):
        return [value] * cases
    if len(value) != cases:
        raise ValueError(f"an entry has {cases} workloads and {len(value)} values of {name}")
    return value
