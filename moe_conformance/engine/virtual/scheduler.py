"""Scheduler: of all threads one runs, until it has to wait for another or is done.

So a run takes the same course every time, needs no locks, and does not pay for threads that wake each other in vain;
and where nobody can go on, that is known at once and for certain.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


class Scheduler:
    """Hands the floor from thread to thread, in the order in which they became ready.

    Everything but `begin` and `quiet` is for the thread that has the floor.

    Args:
        size: The number of threads, numbered from 0.
        on_release: Called with its number by a thread that is about to let go of the floor.
        on_acquire: Called with its number by a thread that has got the floor.
    """

    def __init__(self, size: int, on_release: Callable[[int], None], on_acquire: Callable[[int], None]) -> None:
        self._on_release, self._on_acquire = on_release, on_acquire
        self._ready: deque[int] = deque()
        self._locks = [_locked() for _ in range(size)]  # open to one, once
        self._idle = _locked()

    def start(self) -> None:
        """Gives the floor to thread 0; all are ready, and wait in `enter`. Called from outside."""
        self._ready.extend(range(len(self._locks)))
        self._run_next()

    def wait_until_idle(self, patience_s: float | None = None) -> bool:
        """Waits until no thread is ready, from outside; returns False if some still are after `patience_s`."""
        return self._idle.acquire(timeout=-1 if patience_s is None else max(patience_s, 0.0))

    def acquire(self, number: int) -> None:
        """Waits for the floor."""
        self._locks[number].acquire()
        self._on_acquire(number)

    def wait(self, number: int) -> None:
        """Lets others go on; returns when somebody has made this thread ready and its turn has come."""
        self._on_release(number)
        self._run_next()
        self.acquire(number)

    def wake(self, numbers: Iterable[int]) -> None:
        """Lets paused threads go on, in this order, when those before them have had their turn."""
        self._ready.extend(numbers)

    def release(self, number: int) -> None:
        """Lets others go on, for good."""
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
