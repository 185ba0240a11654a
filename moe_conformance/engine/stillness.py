"""Proof that a world can no longer move, long before its deadline.

Ranks on one machine are woken by each other alone. If no thread of any rank has run, or waited for a
processor, for half a second, and each rank without an answer waits in a collective, then nothing will ever
wake them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

INTERVAL_S = 0.05  # between two looks
PROOF_S = 0.5
_IDLE_SHARE = 0.1  # of one processor: gloo's threads wake up every few milliseconds to do nothing


class Stillness:
    """Watches the processor time of processes; always "moving" where the kernel does not tell it."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._looked = self._since = time.monotonic()
        self._used = self._used_ns()

    def seconds(self) -> float:
        """Returns for how long nothing has moved; call it every INTERVAL_S."""
        now, used = time.monotonic(), self._used_ns()
        if (
            self._used is None
            or used is None
            or (used - self._used) / 1e9 > _IDLE_SHARE * (now - self._looked)
        ):
            self._since = now
        self._looked, self._used = now, used
        return now - self._since

    def _used_ns(self) -> int | None:
        """Nanoseconds that all threads have run or, ready to run, waited for a processor."""
        total = 0
        for pid in self._pids:
            with contextlib.suppress(OSError):  # a process that has ended moves nothing
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with (
                        contextlib.suppress(OSError),
                        open(f"/proc/{pid}/task/{thread}/schedstat") as schedstat,
                    ):
                        ran, delayed, _ = schedstat.read().split()
                        total += int(ran) + int(delayed)
        return total or None
