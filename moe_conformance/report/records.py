"""The record of one check on one case; pytest's report carries it, also through xdist, and result.json holds it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

Verdict = Literal[
    "pass", "fail", "crash", "hang", "unstable", "error", "vacuous", "unexpected pass", "infrastructure",
    "waived", "not kept", "refused", "not adapted", "limit", "not applicable", "not run",
]  # fmt: skip

# "not kept": a SHOULD that was judged and does not hold, which fails under --strict only (docs/decisions/0012).
# "infrastructure", a fault of the machine, is last: it says nothing about the backend.
FAILING: tuple[Verdict, ...] = (
    "fail", "crash", "hang", "unstable", "error", "vacuous", "unexpected pass", "infrastructure",
)  # fmt: skip

# The verdict of a group of items: the first of these that one of them has.
_PRECEDENCE: tuple[Verdict, ...] = (
    *FAILING, "waived", "not kept", "pass", "refused", "not adapted", "limit", "not applicable", "not run",
)  # fmt: skip

PROPERTY = "moe-conformance"
FOLLOWS = "moe-conformance-follows"  # property of a failure that another of its case explains: shown at the end

EVERY_RANK_FINISHES = ("EXCH-09",)  # violated by a case in which a rank raised, died or hung
CASE_CRASHED = "CaseCrashed"  # the kind of a check not run since another reports a fault of their whole case
FALSE_LIMIT = "FalseLimit"  # the kind of a fault of the whole case that is no crash


def nothing_compared() -> dict[str, Any]:
    """Return the counts of a check that has compared nothing."""
    return {"elements": 0, "pairs": 0, "ranks": []}


@dataclass(frozen=True)
class Record:
    """How one check ended on one case, or on one cell if it draws workloads.

    A record of what was not run can stand for all cases of a cell, see `not_run.folded`.
    """

    node: str  # the check's node id, with the id of the case in brackets
    check: str  # the function's name
    requirements: tuple[str, ...]
    verdict: Verdict
    message: str = ""  # the diagnosis, or why it was skipped
    kind: str | None = None  # of what went wrong: the mismatch's or exception's type
    stage: str | None = None
    blamed: tuple[int, ...] = ()  # ranks
    variant: str | None = None
    layout: str | None = None
    workload: str | None = None
    traits: tuple[str, ...] = ()  # of the workload, see `workloads.records.told`
    compared: Mapping[str, Any] = field(default_factory=nothing_compared)  # elements, pairs, ranks, see Tally
    travelled: Mapping[str, float] = field(default_factory=dict)  # rows, bytes, calls, see Tally
    worst: float = 0.0  # observed/allowed error
    # By quantity, such as "loss": "ratio", "at" and "factor", see `verdict.Deviation`.
    deviations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bits: tuple[int, int] = (0, 0)  # elements of two runs within rounding, and how many have other bits
    resolved: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""  # a rank's traceback, what Hypothesis drew
    waiver: str | None = None  # the waiver that matches the item
    runs: int = 0  # runs on ranks that this item caused; other items read the same
    drawn: Mapping[str, int] = field(default_factory=dict)  # batches that it drew, and how many had what they may have
    replay: tuple[str, ...] = ()  # commands that run the smallest failing examples that were drawn, one each
    cases: int = 1  # how many it stands for; more than one only where they were not run

    @property
    def item(self) -> str:
        """The item's name without its file: `test_name[alltoall-ep2-uneven]`."""
        return self.node.rpartition("::")[2]

    @property
    def case(self) -> str | None:
        """The id of the case or cell: `alltoall-ep2-uneven`."""
        return "-".join(part for part in (self.variant, self.layout, self.workload) if part) or None

    def reproduce(self, again: str) -> str:
        """Return the command that judges only this item, given the command that repeats the run."""
        # A fault of the whole case violates requirements of other checks too.
        whole = self.verdict in ("crash", "hang") or self.kind == FALSE_LIMIT
        only = "" if whole else f" --only {','.join(self.requirements)}"
        return f"{again}{only} -- -k {shlex.quote(self.item)}"

    def to_json(self) -> dict[str, Any]:
        """Return the record as lists, dicts, strings and numbers, without what is at its default."""
        values = {name: value for name, value in vars(self).items() if value != _DEFAULTS.get(name, MISSING)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown, or of another type.
        """
        if not isinstance(data, Mapping):
            raise ValueError("a record is no object")
        for name, value in data.items():
            if name not in _TYPES or not _IS_OF[_TYPES[name]](value):
                raise ValueError(f"a record has {name} = {repr(value)[:60]}")
        if missing := [name for name in _TYPES if name not in data and name not in _DEFAULTS]:
            raise ValueError(f"a record has no {missing[0]}")
        values: dict[str, Any] = {
            name: tuple(value) if _TYPES[name].startswith("tuple") else value for name, value in data.items()
        }
        return cls(**values)


_TYPES: Mapping[str, str] = {field_.name: str(field_.type) for field_ in fields(Record)}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _each(values: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(values, (list, tuple)) and all(map(is_one, values))


def _of_names(values: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(values, Mapping) and all(map(_text, values)) and all(map(is_one, values.values()))


def _deviations(value: object) -> bool:
    def is_one(each: object) -> bool:
        known = isinstance(each, Mapping) and each.keys() == {"ratio", "at", "factor"}
        return known and _number(each["ratio"]) and _text(each["at"]) and _text(each["factor"])  # type: ignore[index]

    return _of_names(value, is_one)


def _compared(value: object) -> bool:
    known = isinstance(value, Mapping) and value.keys() == nothing_compared().keys()
    return known and _whole(value["elements"]) and _whole(value["pairs"]) and _each(value["ranks"], _whole)  # type: ignore[index]


# What a field may be in plain data, by its type.
_IS_OF: Mapping[str, Callable[[object], bool]] = {
    "str": _text,
    "str | None": lambda value: value is None or _text(value),
    "Verdict": lambda value: _text(value) and value in get_args(Verdict),
    "int": _whole,
    "float": _number,
    "tuple[str, ...]": lambda value: _each(value, _text),
    "tuple[int, ...]": lambda value: _each(value, _whole),
    "tuple[int, int]": lambda value: _each(value, _whole) and len(value) == 2,  # type: ignore[arg-type]
    "Mapping[str, Any]": _compared,
    "Mapping[str, Mapping[str, Any]]": _deviations,
    "Mapping[str, float]": lambda value: _of_names(value, _number),
    "Mapping[str, int]": lambda value: _of_names(value, _whole),
    "Mapping[str, str]": lambda value: _of_names(value, _text),
}
_DEFAULTS: Mapping[str, Any] = {
    field_.name: field_.default if field_.default_factory is MISSING else field_.default_factory()
    for field_ in fields(Record)
}


def all_of_report(properties: Iterable[tuple[str, Any]]) -> Iterator[Record]:
    """Yield the records among a report's user properties: as they are, or as plain data if they came through xdist."""
    for name, value in properties:
        if name == PROPERTY:
            yield value if isinstance(value, Record) else Record.from_json(value)


def of_report(properties: Iterable[tuple[str, Any]]) -> Record | None:
    """Return the first record among a report's user properties, or None."""
    return next(all_of_report(properties), None)


def other_bits(records: Iterable[Record]) -> dict[str, int] | None:
    """Return how many elements of two runs were compared within rounding, and how many of them have other bits.

    A report states this number; it decides no verdict. None if no two runs were compared within rounding.
    """
    counted = [record.bits for record in records if record.bits[0]]
    if not counted:
        return None
    return {"elements": sum(of for of, _ in counted), "other": sum(other for _, other in counted)}


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a group of items: failing if one fails, pass if at least one passes and none fails.

    A waived item and a SHOULD that is not kept take precedence over a pass. Without items: not run.
    """
    seen = set(verdicts)
    return next((verdict for verdict in _PRECEDENCE if verdict in seen), "not run")


assert set(_PRECEDENCE) == set(get_args(Verdict))
