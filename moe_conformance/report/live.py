"""Failures as they happen: the first of a kind in full, the others counted."""

from __future__ import annotations

from collections import Counter

from moe_conformance.report import words
from moe_conformance.report.records import FAILING, Record

MOST_TOLD = 10  # kinds that are told while the run goes on; all are told at its end


class Live:
    """What has been told of the failures of a run so far."""

    def __init__(self, again: str) -> None:
        """Take the command that repeats the run, see `Record.reproduce`."""
        self._again = again
        self._seen: Counter[tuple[str, ...]] = Counter()

    @property
    def told(self) -> frozenset[tuple[str, ...]]:
        """The kinds of which one failure was told."""
        return frozenset(list(self._seen)[:MOST_TOLD])

    def lines(self, record: Record, script: str = "") -> tuple[str, ...]:
        """Return a title and what belongs to it; nothing for what did not fail, or failed as another did.

        `script` is the path of the script that repeats it, if there is one.
        """
        if record.verdict not in FAILING:
            return ()
        kind = words.kind(record)
        self._seen[kind] += 1
        if self._seen[kind] > 1 or len(self._seen) > MOST_TOLD:
            return ()
        told = [words.Group((record,)).title, record.item, *words.failure(record, self._again, script).splitlines()]
        if len(self._seen) == MOST_TOLD:
            told.append("further kinds of failure are told at the end")
        return tuple(told)
