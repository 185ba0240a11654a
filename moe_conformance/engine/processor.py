"""For how long the threads of a process have run."""

from __future__ import annotations

import os


def ran_ns(pid: int, main: bool) -> dict[int, int]:
    """Returns the nanoseconds for which each thread of a process has run, or (`main`) its main thread alone.

    A process that has ended moves nothing: its threads have run for 0 ns. Empty where the machine cannot tell (only
    Linux can).
    """
    if _thread_ran_ns(os.getpid(), os.getpid()) == 0:
        return {}
    return {thread: _thread_ran_ns(pid, thread) for thread in ([pid] if main else _threads_of(pid))}


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _thread_ran_ns(pid: int, thread: int) -> int:
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as schedstat:
            return int(schedstat.read().split()[0])
    except OSError:
        return 0
