"""Shows failures while the run goes on: the first of each kind in full; the others are counted."""

from __future__ import annotations

from collections import Counter

from moe_conformance.report import words
from moe_conformance.report.records import FAILING, Record

MOST_SHOWN = 10  # kinds that are shown while the run goes on; all are shown at its end


class Live:
    """The kinds of failure that were shown so far."""

    def __init__(self, again: str) -> None:
        """Take the command that repeats the run, see `Record.reproduce`."""
        self._again = again
        self._seen: Counter[tuple[str, ...]] = Counter()

    @property
    def shown(self) -> frozenset[tuple[str, ...]]:
        """The kinds of which one failure was shown."""
        return frozenset(list(self._seen)[:MOST_SHOWN])

    def lines(self, record: Record, script: str = "") -> tuple[str, ...]:
        """Return a title and the failure; nothing for a pass, or for a kind of failure that was shown already.

        `script` is the path of the script that repeats it, "" without one.
        """
        if record.verdict not in FAILING:
            return ()
        kind = words.kind(record)
        self._seen[kind] += 1
        if self._seen[kind] > 1 or len(self._seen) > MOST_SHOWN:
            return ()
        lines = [words.Group((record,)).title, record.item, *words.failure(record, self._again, script).splitlines()]
        if len(self._seen) == MOST_SHOWN:
            lines.append("further kinds of failure are shown at the end")
        return tuple(lines)
