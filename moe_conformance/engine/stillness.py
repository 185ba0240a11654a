"""Proof that ranks can no longer move, long before their deadline.

Ranks on one machine are woken by each other alone. If for half a second no rank's main thread has run at all,
no other thread of any rank has done any work or waited for a processor to do it, and each rank without an answer
stands in a collective, then nothing will ever wake them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

INTERVAL_S = 0.05  # between two looks
PROOF_S = 0.5
_IDLE_SHARE = 0.05  # of a processor, per thread: gloo's wake up every few milliseconds to find nothing to do


class Stillness:
    """Watches the processor time of all threads of some processes, where the kernel tells it; Linux does."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._can_tell = _used_ns(os.getpid(), os.getpid()) > 0
        self._since = self._looked = time.monotonic()
        self._mains: list[int] = []
        self._threads: Mapping[int, int] | None = None

    def seconds(self) -> float:
        """Returns for how long nothing has moved; to be called every INTERVAL_S."""
        now = time.monotonic()
        mains = [_used_ns(pid, pid) for pid in self._pids]
        if not self._can_tell or mains != self._mains:
            # As long as a main thread runs, the others need not be looked at: there are many of them.
            self._mains, self._threads, self._since = mains, None, now
            return 0.0
        threads = {thread: _used_ns(pid, thread) for pid in self._pids for thread in _threads_of(pid)}
        if self._threads is None or _busiest_ns(self._threads, threads) > _IDLE_SHARE * 1e9 * (now - self._looked):
            self._since = now
        self._threads, self._looked = threads, now
        return now - self._since


def _busiest_ns(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    return max((used - before.get(thread, 0) for thread, used in after.items()), default=0)


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # a process that has ended moves nothing
        return []


def _used_ns(pid: int, thread: int) -> int:
    """Returns the nanoseconds that a thread has run or, ready to run, waited for a processor."""
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as schedstat:
            ran, delayed, _ = schedstat.read().split()
    except OSError:
        return 0
    return int(ran) + int(delayed)
