"""Evidence that ranks can no longer move, long before their deadline.

Ranks on one machine are woken by each other alone. While they wait in a collective their main threads do not run at
all, and the transport's own threads wake up every few milliseconds to find nothing to do. Where that is all that
happens, in all ranks at once, nothing will ever happen again: unless it only has not had its turn. On a machine with
more to do than it has processors, stillness is no evidence until it has lasted for many such turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from .processor import Turns

INTERVAL_S = 0.05  # between two looks
# Of a processor, per thread, since the beginning. Idle threads of gloo were seen to run for 0.0015 of the time. One
# that has data to move runs for at least its fair share of a crowded machine.
_IDLE_SHARE = 0.01
_IDLE_NS = 1_000_000
# A message is moved in a handful of turns. How much longer stillness must last where threads wait all the time.
_CROWDED = 20.0

Look = Callable[[bool], Mapping[int, Mapping[int, Turns]]]  # given `mains`, see Host.turns


class Stillness:
    """Watches the processor time of all threads of some ranks, from its making until the first of them moves."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._began = time.monotonic()
        self._mains = look(True)
        self._first = look(False)
        self._latest = self._first

    def holds(self) -> bool:
        """Tells whether nothing has moved so far, nor is about to."""
        mains = self._look(True)  # first: the others are many
        if not all(mains.values()) or mains != self._mains or any(turns.ready for turns in _threads(mains)):
            return False
        self._latest = self._look(False)
        allowed = _IDLE_NS + _IDLE_SHARE * 1e9 * self.seconds()
        return all(now.ran_ns - before.ran_ns <= allowed for before, now in self._pairs())

    def lasts(self, patience_s: float) -> bool:
        """Tells whether it has held for so long, on a crowded machine longer, as far as `holds` last looked.

        Never while a thread waits for a turn and has had none since the beginning.
        """
        seconds = self.seconds()
        if seconds < patience_s or any(now.ready and now.count == before.count for before, now in self._pairs()):
            return False
        waited = max((now.waited_ns - before.waited_ns for before, now in self._pairs()), default=0)
        return seconds >= patience_s * (1 + _CROWDED * waited / (1e9 * seconds))

    def seconds(self) -> float:
        """Returns the time since the beginning."""
        return time.monotonic() - self._began

    def _pairs(self) -> Iterator[tuple[Turns, Turns]]:
        """Yields what each thread had had at the beginning, and when last looked at."""
        for rank, threads in self._latest.items():
            first = self._first.get(rank, {})
            yield from ((first.get(thread, Turns(0, 0, 0, False)), turns) for thread, turns in threads.items())


def _threads(ranks: Mapping[int, Mapping[int, Turns]]) -> Iterator[Turns]:
    for threads in ranks.values():
        yield from threads.values()
