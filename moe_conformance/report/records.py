"""One judged item as plain data: it travels in a report's user properties, through xdist, into result.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

Verdict = Literal[
    "pass", "fail", "crash", "hang", "unstable", "error", "vacuous", "unexpected pass", "infrastructure",
    "waived", "refused", "not adapted", "limit", "not applicable", "not run",
]  # fmt: skip

# The machine's fault is last: it says nothing of the backend, and a run that met it shows less than it should.
FAILING: tuple[Verdict, ...] = (
    "fail", "crash", "hang", "unstable", "error", "vacuous", "unexpected pass", "infrastructure",
)  # fmt: skip

# What a group of items comes to: the first of these that one of them has.
_PRECEDENCE: tuple[Verdict, ...] = (
    *FAILING, "waived", "pass", "refused", "not adapted", "limit", "not applicable", "not run",
)  # fmt: skip

PROPERTY = "moe-conformance"

_TUPLES = ("requirements", "blamed", "replay", "traits")
_MAPPINGS = ("compared", "travelled", "resolved", "drawn")


@dataclass(frozen=True)
class Record:
    """How one item ended. An item is one check on one case, or on one cell where it draws its own workloads."""

    node: str  # pytest's node id
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
    traits: tuple[str, ...] = ()  # of the workload, see `workloads.features.traits`
    compared: Mapping[str, Any] = field(default_factory=dict)  # elements, pairs: numbers; ranks: list; see Tally
    travelled: Mapping[str, float] = field(default_factory=dict)  # rows, bytes, calls, see Tally
    worst: float = 0.0  # observed/allowed error
    resolved: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""  # a rank's traceback, what Hypothesis drew
    reproduce: str = ""
    waiver: str | None = None  # the waiver that matches the item
    runs: int = 0  # runs on ranks that this item caused; other items read the same
    drawn: Mapping[str, int] = field(default_factory=dict)  # batches that it drew, and how many had what they may have
    replay: tuple[str, ...] = ()  # commands that run the smallest failing examples that were drawn, one each

    @property
    def item(self) -> str:
        """The item's name without its file: `test_name[alltoall-ep2-uneven]`."""
        return self.node.rpartition("::")[2]

    @property
    def case(self) -> str | None:
        """The id of the case or cell: `alltoall-ep2-uneven`."""
        return "-".join(part for part in (self.variant, self.layout, self.workload) if part) or None

    def to_json(self) -> dict[str, Any]:
        """Return the record as dicts, lists, strings and numbers."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        copies = {name: dict(data[name]) for name in _MAPPINGS}
        return data | copies | {name: list(data[name]) for name in _TUPLES}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
        return cls(**{**data, **{name: tuple(data[name]) for name in _TUPLES}})


def of_report(properties: Iterable[tuple[str, Any]]) -> Record | None:
    """Return the record among a report's user properties, or None."""
    return next((Record.from_json(value) for name, value in properties if name == PROPERTY), None)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return what a group of items comes to: failing if one fails, pass if at least one passes and none fails.

    A waived item is a failure that somebody answers for, so it shows over a pass. Without items: not run.
    """
    seen = set(verdicts)
    return next((verdict for verdict in _PRECEDENCE if verdict in seen), "not run")


assert set(_PRECEDENCE) == set(get_args(Verdict))
