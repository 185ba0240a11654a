"""What the threads of a process get of the machine's processors."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Turns:
    """The turns of one thread on a processor, since it began.

    Attributes:
        ran_ns: For how long it has run.
        waited_ns: For how long it could have run and waited for its turn, until the latest of them.
        count: How many it had.
        ready: Whether it waits for a turn, or for a disk, right now.
    """

    ran_ns: int
    waited_ns: int
    count: int
    ready: bool


_NONE = Turns(0, 0, 0, False)


def turns(pid: int, main: bool) -> dict[int, Turns]:
    """Returns what each thread of a process has had, or (`main`) its main thread alone.

    Threads of a process that has ended have had nothing. Empty where the machine cannot tell (only Linux can).
    """
    if _of_thread(os.getpid(), os.getpid()) == _NONE:
        return {}
    return {thread: _of_thread(pid, thread) for thread in ([pid] if main else _threads_of(pid))}


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _of_thread(pid: int, thread: int) -> Turns:
    folder = f"/proc/{pid}/task/{thread}"
    try:
        with open(f"{folder}/schedstat", "rb") as schedstat, open(f"{folder}/stat", "rb") as stat:
            ran, waited, count = map(int, schedstat.read().split())
            state = stat.read().rpartition(b")")[2].split()[0]
    except OSError:
        return _NONE
    return Turns(ran, waited, count, state in (b"R", b"D"))
