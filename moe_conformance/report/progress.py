"""The live line of a run on a terminal; elsewhere nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 0.1


class Progress:
    """Counts items, cases and failures, and rewrites one line a few times a second."""

    def __init__(self, rewrite: Callable[[str], None], width: int, total: int) -> None:
        """Take the function that replaces the line on the terminal, its width, and the number of items (0: unknown)."""
        self._rewrite, self._width = rewrite, width
        self._started = self._shown = time.monotonic()
        self.total = total
        self._done = self._failed = self._cases = 0

    def step(self, place: str, *, failed: bool, runs: int) -> None:
        """Count an item that ended."""
        self._done += 1
        self._failed += failed
        self._cases += runs
        now = time.monotonic()
        if now - self._shown < _EVERY_S:
            return
        self._shown = now
        total = f"/{self.total}" if self.total else ""
        rate = self._cases / (now - self._started)
        line = f"{self._done}{total} checks, {self._failed} failed, {self._cases} cases, {rate:.0f}/s  {place}"
        self._show(line[: self._width - 1])

    def clear(self) -> None:
        """Leave an empty line."""
        self._show("")

    def _show(self, line: str) -> None:
        self._rewrite(line.ljust(self._width - 1))
