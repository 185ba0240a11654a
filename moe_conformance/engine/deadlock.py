"""Detects that ranks are deadlocked in collectives, long before the job's deadline.

Ranks on one machine are woken only by each other. While they wait in a collective their main threads do not run, and
the transport's threads wake up every few milliseconds and find nothing to do. If that is all that happens, in all ranks
at once, nothing will happen any more; unless a thread that has work to do was not scheduled yet. On a machine with more
runnable threads than processors, ranks must therefore be idle for many time slices before that counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from . import stacks
from .hosts import Hosts, RankProcess
from .processes import ThreadStats

INTERVAL_S = 0.05  # between two readings
# A thread is idle if it runs for less than this share of the period. Idle threads of gloo were seen to run for 0.0015
# of the time; one that has data to move runs for at least its fair share of a crowded machine.
_IDLE_SHARE = 0.01
_IDLE_NS = 1_000_000
# A message is moved in a few time slices. How much longer ranks must be idle where threads wait for a slice all the
# time.
_CROWDED = 20.0

ReadStats = Callable[[bool], Mapping[int, Mapping[int, ThreadStats]]]  # given `main_only`, see Hosts.thread_stats
_IDLE_S = 0.25  # before stacks are requested, and again afterwards


class DeadlockWatch:
    """Detects a deadlock in about half a second, or in a few seconds on a crowded machine.

    The proof: all ranks are idle; then each rank without an answer, woken to dump its stack, is in a collective; then
    all ranks are idle again. If a stack is elsewhere, the next one is requested after twice the time.
    """

    def __init__(self, hosts: Hosts, ranks: Sequence[RankProcess]) -> None:
        self._hosts = hosts
        self._read = partial(hosts.thread_stats, ranks)
        self._patience_s = _IDLE_S
        self._in_collectives = False
        self._main_threads = self._read(True)
        self._idle: IdlePeriod | None = None  # reads all threads: only once the main threads are idle

    def proves(self, pending: Collection[RankProcess]) -> bool:
        """Returns True once a deadlock is proved; to be called every INTERVAL_S."""
        if self._idle is None or not self._idle.is_idle():
            self._in_collectives = False
            before, self._main_threads = self._main_threads, self._read(True)
            self._idle = IdlePeriod(self._read) if before == self._main_threads else None
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
    """A period, from construction on, in which no thread of the given ranks does more than idle work."""

    def __init__(self, read: ReadStats) -> None:
        self._read = read
        self._began = time.monotonic()
        self._main_threads = read(True)
        self._first = read(False)
        self._latest = self._first

    def is_idle(self) -> bool:
        """Reads the statistics; returns True if no thread worked since construction and no main thread is runnable."""
        main_threads = self._read(True)  # first, since there are many other threads
        if not all(main_threads.values()) or main_threads != self._main_threads:
            return False
        if any(stats.ready for stats in _threads(main_threads)):
            return False
        self._latest = self._read(False)
        allowed = _IDLE_NS + _IDLE_SHARE * 1e9 * self.seconds()
        return all(now.ran_ns - before.ran_ns <= allowed for before, now in self._pairs())

    def lasted(self, patience_s: float) -> bool:
        """Returns True if the period was at least `patience_s` long when `is_idle` was last called.

        On a crowded machine it must be longer. False while a thread is runnable and has not run since construction.
        """
        seconds = self.seconds()
        if seconds < patience_s or any(now.ready and now.count == before.count for before, now in self._pairs()):
            return False
        waited = max((now.waited_ns - before.waited_ns for before, now in self._pairs()), default=0)
        return seconds >= patience_s * (1 + _CROWDED * waited / (1e9 * seconds))

    def seconds(self) -> float:
        """Returns the seconds since construction."""
        return time.monotonic() - self._began

    def _pairs(self) -> Iterator[tuple[ThreadStats, ThreadStats]]:
        """Yields each thread's statistics at construction and at the latest call of `is_idle`."""
        for rank, threads in self._latest.items():
            first = self._first.get(rank, {})
            yield from ((first.get(thread, ThreadStats(0, 0, 0, False)), stats) for thread, stats in threads.items())


def _threads(ranks: Mapping[int, Mapping[int, ThreadStats]]) -> Iterator[ThreadStats]:
    for threads in ranks.values():
        yield from threads.values()
