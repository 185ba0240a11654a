"""Cooperative scheduling of the threads of virtual ranks: one runs, until it waits or ends.

A run is therefore reproducible and needs no locks, no thread is woken in vain, and a deadlock is detected at once and
with certainty.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


class Scheduler:
    """Lets one thread run at a time, in the order in which they became ready.

    All methods but `start` and `wait_until_idle` are called by the running thread.

    Args:
        size: The number of threads, numbered from 0.
        on_release: Called with its number by a thread that stops running.
        on_acquire: Called with its number by a thread that starts to run.
    """

    def __init__(self, size: int, on_release: Callable[[int], None], on_acquire: Callable[[int], None]) -> None:
        self._on_release, self._on_acquire = on_release, on_acquire
        self._ready: deque[int] = deque()
        self._locks = [_locked() for _ in range(size)]  # released for one acquire
        self._idle = _locked()

    def start(self) -> None:
        """Runs thread 0; all threads are ready, and wait in `acquire`. Called from outside."""
        self._ready.extend(range(len(self._locks)))
        self._run_next()

    def wait_until_idle(self, patience_s: float | None = None) -> bool:
        """Waits, from outside, until no thread is ready; returns False if one still is after `patience_s`."""
        return self._idle.acquire(timeout=-1 if patience_s is None else max(patience_s, 0.0))

    def acquire(self, number: int) -> None:
        """Waits until the thread may run."""
        self._locks[number].acquire()
        self._on_acquire(number)

    def wait(self, number: int) -> None:
        """Lets other threads run; returns once this thread was woken and it is its turn."""
        self._on_release(number)
        self._run_next()
        self.acquire(number)

    def wake(self, numbers: Iterable[int]) -> None:
        """Makes waiting threads ready, in this order, after those that are ready already."""
        self._ready.extend(numbers)

    def release(self, number: int) -> None:
        """Lets other threads run, at the end of this one's work."""
        self._on_release(number)
        self._run_next()

    def _run_next(self) -> None:
        if self._ready:
            self._locks[self._ready.popleft()].release()
        else:
            self._idle.release()


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
