"""Evidence that ranks can no longer move, long before their deadline.

Ranks on one machine are woken by each other alone. While they wait in a collective their main threads do not run at
all, and the transport's own threads wake up every few milliseconds to find nothing to do. Where that is all that
happens, in all ranks at once, nothing will ever happen again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

INTERVAL_S = 0.05  # between two looks
# Of a processor, per thread, since the beginning. Idle threads of gloo were seen to run for 0.0015 of the time. One
# that has data to move runs for at least its fair share of a crowded machine.
_IDLE_SHARE = 0.01
_IDLE_NS = 1_000_000


Look = Callable[[bool], Mapping[int, Mapping[int, int]]]  # given `mains`, see Host.ran_ns


class Stillness:
    """Watches the processor time of all threads of some ranks, from its making until the first of them moves."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._began = time.monotonic()
        self._mains = look(True)
        self._threads = look(False)

    def holds(self) -> bool:
        """Tells whether nothing has moved so far."""
        if not all(self._mains.values()) or self._mains != self._look(True):  # first: the others are many
            return False
        allowed = _IDLE_NS + _IDLE_SHARE * 1e9 * self.seconds()
        return all(
            ran - self._threads.get(rank, {}).get(thread, 0) <= allowed
            for rank, threads in self._look(False).items()
            for thread, ran in threads.items()
        )

    def seconds(self) -> float:
        """Returns the time since the beginning."""
        return time.monotonic() - self._began
