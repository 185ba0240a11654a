"""What an adapter excludes by its own word: what it does not adapt, and what is outside of limits that nothing proves.

A refusal of the library is tried and proved, and counts neither as judged nor as excluded. Everything else that a run
asked for and did not judge is excluded by the adapter's word alone. So a run that passes says of how much it passes,
and which values were excluded everywhere: a dtype, a K, ranks without tokens, ep > 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_conformance.report.records import Record, Verdict
from moe_conformance.report.standing import JUDGED, counted
from moe_conformance.workloads.records.told import CONDITIONS, DTYPES, MOVES, value_of_K

OWN: tuple[Verdict, ...] = ("not adapted", "limit")
_MOVING = "exchanges and layers"
_AXES = tuple(f"{axis} > 1" for axis in ("ep", "etp", "tp", "cp"))  # of the layout


@dataclass(frozen=True)
class OwnWord:
    """How much of what it was asked a backend was judged by, and what its adapter excludes.

    Attributes:
        judged: Checks on cases that were judged.
        excluded: Those that were not, by the word of the adapter.
        limited: Of these the ones outside of limits that nothing proves.
        values: What was excluded wherever it was asked for: `bfloat16`, `K > 2`, `ep > 1 of exchanges and layers`.
    """

    judged: int
    excluded: int
    limited: int
    values: tuple[str, ...]

    @property
    def share(self) -> int:
        """The percentage that was judged, rounded down: 100 is all, also where nothing was asked."""
        asked = self.judged + self.excluded
        return 100 * self.judged // asked if asked else 100

    @property
    def sentence(self) -> str:
        """What is excluded, in words; "" if it is no value, and under no limit."""
        found = [", ".join(self.values)] if self.values else []
        found += [f"{self.limited} checks under limits that nothing proves"] if self.limited else []
        return f"by its own word not: {'; '.join(found)}" if found else ""


@dataclass(frozen=True)
class _Family:
    """What was judged and what was excluded of some runs, by value."""

    judged: Counter[str]
    own: Counter[str]

    def excludes(self, value: str) -> bool:
        """Whether a value was asked for, and judged nowhere."""
        return bool(self.own[value]) and not self.judged[value]

    def judges(self, value: str) -> bool:
        """Whether a value was judged somewhere."""
        return bool(self.judged[value])


def own_word(records: Iterable[Record]) -> OwnWord:
    """Return what the adapter of a run excludes, given all records."""
    moving, others = (_Family(Counter(), Counter()) for _ in range(2))
    judged = 0
    excluded: Counter[Verdict] = Counter()
    for record in records:
        if record.verdict not in JUDGED and record.verdict not in OWN:
            continue
        family = moving if MOVES in record.traits else others
        values = dict.fromkeys(["", *counted(record.traits), *_axes(record.layout)], record.cases)
        if record.verdict in JUDGED:
            judged += record.cases
            family.judged.update(values)
        else:
            excluded[record.verdict] += record.cases
            family.own.update(values)
    return OwnWord(judged, excluded.total(), excluded["limit"], tuple(_values(moving, others)))


def line(head: Mapping[str, Any], records: Iterable[Record]) -> str:
    """Return the first line on a run: whether it passed, of how much, and what its adapter excludes."""
    found = own_word(records)
    verdict = "stopped" if head["stopped"] else "passed" if head["exit"] == 0 else "failed"
    part = f", of {found.share} % of what it is asked" if found.share < 100 else ""
    return "; ".join(filter(None, [verdict + part, found.sentence]))


def _values(moving: _Family, others: _Family) -> list[str]:
    """Return the values that were excluded, in words."""
    if moving.excludes(""):
        return [_MOVING, *_in_words(others, [value for value in others.own if value and others.excludes(value)])]
    everywhere: list[str] = []
    of_moving: list[str] = []
    for value in moving.own:
        if value and moving.excludes(value):
            (of_moving if others.judges(value) else everywhere).append(value)
    of_others = [v for v in others.own if v and v not in everywhere and others.excludes(v) and not moving.judges(v)]
    named = [f"{value} of {_MOVING}" for value in _in_words(moving, of_moving)]
    return [*_in_words(moving, everywhere), *named, *_in_words(others, of_others)]


def _in_words(family: _Family, values: Iterable[str]) -> list[str]:
    """Return values in words, dtypes first: each K above all that were judged as one."""
    excluded = set(values)
    Ks = sorted(K for value in excluded if (K := value_of_K(value)) is not None)
    most = max((K for value in family.judged if (K := value_of_K(value)) is not None), default=0)
    in_words = [f"K = {K}" for K in Ks if K < most] + ([f"K > {most}"] if any(K > most for K in Ks) else [])
    dtypes, others = ([value for value in some if value in excluded] for some in (DTYPES, (*CONDITIONS, *_AXES)))
    return [*dtypes, *in_words, *others]


def _axes(layout: str | None) -> list[str]:
    """Return the axes of a layout that are larger than 1, as `ep > 1`."""
    return [axis for axis in _AXES if re.search(rf"(^|-){axis.partition(' ')[0]}\d", layout or "")]
