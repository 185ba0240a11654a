"""Shows the progress of a run: one line that is rewritten on a terminal, a line every minute in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

_ON_TERMINAL_S = 0.1
_IN_LOG_S = 60.0


class Progress:
    """Counts items, cases and failures, and shows them from time to time."""

    def __init__(self, show: Callable[[str], None], every_s: float, total: int) -> None:
        """Take the function that shows a line, how often, and the number of items (0: unknown)."""
        self._show, self._every_s = show, every_s
        self._started = self._shown = time.monotonic()
        self.total = total
        self._done = self._failed = self._cases = 0

    @classmethod
    def on_terminal(cls, rewrite: Callable[[str], None], width: int, total: int) -> Progress:
        """Rewrite one line, no wider than the terminal, up to ten times a second."""
        return cls(lambda line: rewrite(line[: width - 1].ljust(width - 1)), _ON_TERMINAL_S, total)

    @classmethod
    def in_log(cls, write_line: Callable[[str], None], total: int) -> Progress:
        """Write a line every minute; a shorter run has none."""
        return cls(write_line, _IN_LOG_S, total)

    def step(self, place: str, *, failed: bool, runs: int) -> None:
        """Count an item that ended."""
        self._done += 1
        self._failed += failed
        self._cases += runs
        now = time.monotonic()
        if now - self._shown < self._every_s:
            return
        self._shown = now
        took = now - self._started
        rate = f"{self._cases / took:.0f} cases/s"
        total = f"/{self.total}" if self.total else ""
        left = f", about {_duration(took * (self.total / self._done - 1))} left" if self.total > self._done else ""
        self._show(f"{self._done}{total} checks, {self._failed} failed, {rate}{left}  {place}")

    def clear(self) -> None:
        """Leave an empty line on a terminal."""
        if self._every_s == _ON_TERMINAL_S:
            self._show("")


def _duration(seconds: float) -> str:
    """Return a duration in seconds or minutes.

    >>> _duration(42.4), _duration(90), _duration(3 * 3600)
    ('42 s', '2 min', '180 min')
    """
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60 + 0.5:.0f} min"
