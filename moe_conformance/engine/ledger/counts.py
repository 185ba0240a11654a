"""How often collectives were called, and how much data went in and out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .entry import Entry


@dataclass(frozen=True)
class Count:
    """Calls of one operator on one group by one rank, and the bytes that it gave and got by them."""

    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def plus(self, entry: Entry) -> Count:
        """Counts one more call."""
        return Count(self.calls + 1, self.bytes_in + entry.bytes_in, self.bytes_out + entry.bytes_out)


def count(entries: Iterable[Entry]) -> dict[tuple[tuple[int, ...], str], Count]:
    """Returns what one rank's ledger comes to, by the ranks of the group and the operator."""
    counts: dict[tuple[tuple[int, ...], str], Count] = {}
    for entry in entries:
        key = entry.ranks, entry.op
        counts[key] = counts.get(key, Count()).plus(entry)
    return counts
