"""Counters of shortcuts, which show whether they are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from moe_conformance.contract import Counted


class ShortcutCounters:
    """Counts decisions and look-ups of one rank, while it is on."""

    def __init__(self, rank: int) -> None:
        """Begin at 0, and count nothing."""
        self.rank, self.on = rank, False
        self.ranks: Collection[int] | None = None
        self.reset()

    def enable(self, on: bool) -> None:
        """Count from now on, or no more."""
        self.on = on

    def restrict(self, ranks: Collection[int]) -> None:
        """Count on these ranks of the world only."""
        self.ranks = ranks

    def reset(self) -> None:
        """Begin at 0 again."""
        self._decisions: Counter[tuple[str, bool]] = Counter()
        self._look_ups: Counter[tuple[str, bool]] = Counter()

    def decided(self, shortcut: str, *, taken: bool) -> None:
        """Count a decision of a call that could take the shortcut.

        Implements: FAST-16.
        """
        if self.counts:
            self._decisions[shortcut, taken] += 1

    def looked_up(self, cache: str, *, hit: bool) -> None:
        """Count a look-up in a cache."""
        if self.counts:
            self._look_ups[cache, hit] += 1

    @property
    def counts(self) -> bool:
        """Whether this rank counts now."""
        return self.on and (self.ranks is None or self.rank in self.ranks)

    def read(self) -> Counted:
        """Return what was counted since the last reset."""
        return Counted(_paired(self._decisions), _paired(self._look_ups))


def _paired(counted: Counter[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    names = dict.fromkeys(name for name, _ in counted)
    return {name: (counted[name, True], counted[name, False]) for name in names}
