"""Figures of several rounds, put together: the median, and the span from the least to the greatest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The median of some figures and their span."""

    median: float
    least: float
    greatest: float

    def text(self, digits: int = 3) -> str:
        """Returns `median (least-greatest)` with that many significant digits."""
        median, least, greatest = (_figure(value, digits) for value in (self.median, self.least, self.greatest))
        return f"{median} ({least}-{greatest})"


def summarise(figures: Sequence[float]) -> Summary:
    """Puts figures together; at least one."""
    return Summary(statistics.median(figures), min(figures), max(figures))


def _figure(value: float, digits: int) -> str:
    """Returns a figure with its significant digits, or with all those before the point."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
