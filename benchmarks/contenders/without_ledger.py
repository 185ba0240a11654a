"""To be imported before ranks are forked: takes the ledger away from them, to see what it costs.

The engine has no such switch: no fault could be explained without a ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from moe_conformance.engine import rank
from moe_conformance.engine.ledger.entry import ENDED_LINE, Asynchrony


class _NoTap:
    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    @contextlib.contextmanager
    def recording(self, asynchrony: Asynchrony) -> Iterator[None]:
        """Records nothing but the end."""
        yield
        self._write(ENDED_LINE)

    def calls(self) -> int:
        """Returns how many calls were recorded."""
        return 0

    def in_flight(self) -> tuple[int, ...]:
        """Returns the numbers of the collectives under way, of which none is known."""
        return ()


rank.Tap = _NoTap  # type: ignore[assignment, attr-defined]
