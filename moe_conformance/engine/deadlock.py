"""Finds out that ranks wait for each other in collectives and always will."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from . import stacks
from .hosts import Hosts, RankProcess
from .processes import ThreadStats

INTERVAL_S = 0.05  # between two looks
# Of a processor, per thread, since the beginning. Idle threads of gloo were seen to run for 0.0015 of the time. One
# that has data to move runs for at least its fair share of a crowded machine.
_IDLE_SHARE = 0.01
_IDLE_NS = 1_000_000
# A message is moved in a handful of turns. How much longer stillness must last where threads wait all the time.
_CROWDED = 20.0

ReadStats = Callable[[bool], Mapping[int, Mapping[int, ThreadStats]]]  # given `main_only`, see Hosts.thread_stats
_IDLE_S = 0.25  # before stacks are asked for, and again afterwards


class DeadlockWatch:
    """Proves a deadlock in about half a second, on a crowded machine in a few.

    The proof: no rank moves; then the stack of each rank without an answer, for which it is woken, stands in a
    collective; then still no rank moves. If a stack stands elsewhere, the next is asked for after twice the time.
    """

    def __init__(self, hosts: Hosts, ranks: Sequence[RankProcess]) -> None:
        self._hosts = hosts
        self._read = partial(hosts.thread_stats, ranks)
        self._patience_s = _IDLE_S
        self._in_collectives = False
        self._mains = self._read(True)
        self._idle: IdlePeriod | None = None  # it looks at all threads: not before the main ones are still

    def proves(self, pending: Collection[RankProcess]) -> bool:
        """Looks at the ranks, of which some have not answered; to be called every INTERVAL_S."""
        if self._idle is None or not self._idle.is_idle():
            self._in_collectives = False
            before, self._mains = self._mains, self._read(True)
            self._idle = IdlePeriod(self._read) if before == self._mains else None
        if self._idle is None or not self._idle.lasted(self._patience_s):
            return False
        if not self._in_collectives:
            texts = self._hosts.stacks(tuple(pending))
            self._in_collectives = all(stacks.waits_in_collective(text) for text in texts.values())
            self._patience_s = _IDLE_S if self._in_collectives else 2 * self._patience_s
            self._idle = IdlePeriod(self._read)
            return False
        return True


class IdlePeriod:
    """Watches the processor time of all threads of some ranks, from its making until the first of them moves."""

    def __init__(self, read: ReadStats) -> None:
        self._read = read
        self._began = time.monotonic()
        self._mains = read(True)
        self._first = read(False)
        self._latest = self._first

    def is_idle(self) -> bool:
        """Tells whether nothing has moved so far, nor is about to."""
        main_only = self._read(True)  # first: the others are many
        if not all(main_only.values()) or main_only != self._mains or any(turns.ready for turns in _threads(main_only)):
            return False
        self._latest = self._read(False)
        allowed = _IDLE_NS + _IDLE_SHARE * 1e9 * self.seconds()
        return all(now.ran_ns - before.ran_ns <= allowed for before, now in self._pairs())

    def lasted(self, patience_s: float) -> bool:
        """Tells whether it has held for so long, on a crowded machine longer, as far as `is_idle` last looked.

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

    def _pairs(self) -> Iterator[tuple[ThreadStats, ThreadStats]]:
        """Yields what each thread had had at the beginning, and when last looked at."""
        for rank, threads in self._latest.items():
            first = self._first.get(rank, {})
            yield from ((first.get(thread, ThreadStats(0, 0, 0, False)), turns) for thread, turns in threads.items())


def _threads(ranks: Mapping[int, Mapping[int, ThreadStats]]) -> Iterator[ThreadStats]:
    for threads in ranks.values():
        yield from threads.values()
