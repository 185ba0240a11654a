"""Turns: of all threads one runs, until it has to wait for another or is done.

So a run takes the same course every time, needs no locks, and does not pay for threads that wake each other in vain;
and where nobody can go on, that is known at once and for certain.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


class Turns:
    """Hands the floor from thread to thread, in the order in which they became ready.

    Everything but `begin` and `quiet` is for the thread that has the floor.

    Args:
        size: The number of threads, numbered from 0.
        leaving: Called with its number by a thread that is about to let go of the floor.
        entering: Called with its number by a thread that has got the floor.
    """

    def __init__(self, size: int, leaving: Callable[[int], None], entering: Callable[[int], None]) -> None:
        self._leaving, self._entering = leaving, entering
        self._ready: deque[int] = deque()
        self._doors = [_closed() for _ in range(size)]  # open to one, once
        self._quiet = _closed()

    def begin(self) -> None:
        """Gives the floor to thread 0; all are ready, and wait in `enter`. Called from outside."""
        self._ready.extend(range(len(self._doors)))
        self._pass_on()

    def quiet(self, patience_s: float | None = None) -> bool:
        """Waits until no thread is ready, from outside; returns False if some still are after `patience_s`."""
        return self._quiet.acquire(timeout=-1 if patience_s is None else max(patience_s, 0.0))

    def enter(self, number: int) -> None:
        """Waits for the floor."""
        self._doors[number].acquire()
        self._entering(number)

    def pause(self, number: int) -> None:
        """Lets others go on; returns when somebody has made this thread ready and its turn has come."""
        self._leaving(number)
        self._pass_on()
        self.enter(number)

    def ready(self, numbers: Iterable[int]) -> None:
        """Lets paused threads go on, in this order, when those before them have had their turn."""
        self._ready.extend(numbers)

    def leave(self, number: int) -> None:
        """Lets others go on, for good."""
        self._leaving(number)
        self._pass_on()

    def _pass_on(self) -> None:
        if self._ready:
            self._doors[self._ready.popleft()].release()
        else:
            self._quiet.release()


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
