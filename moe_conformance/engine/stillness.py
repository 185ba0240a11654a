"""Evidence that ranks can no longer move, long before their deadline.

Ranks on one machine are woken by each other alone. While they wait in a collective their main threads do not run at
all, and the transport's own threads wake up every few milliseconds to find nothing to do. Where that is all that
happens, in all ranks at once, nothing will ever happen again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

INTERVAL_S = 0.05  # between two looks
# Of a processor, per thread, since the beginning. Idle threads of gloo were seen to run for 0.0015 of the time. One
# that has data to move runs for at least its fair share of a crowded machine.
_IDLE_SHARE = 0.01
_IDLE_NS = 1_000_000


class Stillness:
    """Watches the processor time of all threads of some processes, from its making until the first of them moves."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._began = time.monotonic()
        self._mains = self._main_threads()
        self._threads = self._all_threads()
        self._can_tell = _ran_ns(os.getpid(), os.getpid()) > 0  # only Linux tells

    def holds(self) -> bool:
        """Tells whether nothing has moved so far."""
        if not self._can_tell or self._mains != self._main_threads():  # first: the others are many
            return False
        allowed = _IDLE_NS + _IDLE_SHARE * 1e9 * self.seconds()
        return all(ran - self._threads.get(thread, 0) <= allowed for thread, ran in self._all_threads().items())

    def seconds(self) -> float:
        """Returns the time since the beginning."""
        return time.monotonic() - self._began

    def _main_threads(self) -> list[int]:
        return [_ran_ns(pid, pid) for pid in self._pids]

    def _all_threads(self) -> dict[int, int]:
        return {thread: _ran_ns(pid, thread) for pid in self._pids for thread in _threads_of(pid)}


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # a process that has ended moves nothing
        return []


def _ran_ns(pid: int, thread: int) -> int:
    """Returns the nanoseconds for which a thread has run."""
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as schedstat:
            return int(schedstat.read().split()[0])
    except OSError:
        return 0
