"""What the threads of a process get of the machine's processors."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ThreadStats:
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


_NONE = ThreadStats(0, 0, 0, False)


def thread_stats(pid: int, main: bool) -> dict[int, ThreadStats]:
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


def _of_thread(pid: int, thread: int) -> ThreadStats:
    folder = f"/proc/{pid}/task/{thread}"
    try:
        with open(f"{folder}/schedstat", "rb") as schedstat, open(f"{folder}/stat", "rb") as stat:
            ran, waited, count = map(int, schedstat.read().split())
            state = stat.read().rpartition(b")")[2].split()[0]
    except OSError:
        return _NONE
    return ThreadStats(ran, waited, count, state in (b"R", b"D"))


def become_subreaper() -> None:
    """Makes this process the parent of all its offspring that loses its own, in whatever session that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Returns the pids of all children that have not been waited for; where the kernel does not tell, none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none: the usual case, and quickly told
        return []
    lists = Path("/proc/self/task").glob("*/children")
    return sorted(int(pid) for each in lists for pid in each.read_text("ascii").split())


def running_children() -> dict[int, str]:
    """Returns the command of every child that still runs, by its pid."""
    commands = {pid: _command(pid) for pid in children()}
    return {pid: command for pid, command in commands.items() if command is not None}


def _command(pid: int) -> str | None:
    """Returns how a process was called; None if it has ended."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if rest.split()[0] in "ZX":
        return None
    called = b" ".join(words).decode(errors="replace").strip()
    return called or name.partition("(")[2]  # one that has just been started has no words yet
