"""Reads from the kernel a process's children and the scheduling statistics of its threads."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ThreadStats:
    """Scheduling statistics of one thread since it was started.

    Attributes:
        ran_ns: Nanoseconds on a processor.
        waited_ns: Nanoseconds in which it was runnable and waited for a processor, up to its latest time slice.
        count: How many time slices it has had.
        ready: Whether it is runnable, or waits for a disk, now.
    """

    ran_ns: int
    waited_ns: int
    count: int
    ready: bool


_NONE = ThreadStats(0, 0, 0, False)


def thread_stats(pid: int, main: bool) -> dict[int, ThreadStats]:
    """Returns the statistics of all threads of a process, or of its main thread only.

    All zeros for a process that has exited. Empty where the kernel does not provide them (only Linux does).
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
    """Makes this process the parent of all its descendants whose own parent exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Returns the pids of all children that have not been waited for; [] where the kernel does not list them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none, which is the usual case
        return []
    lists = Path("/proc/self/task").glob("*/children")
    return sorted(int(pid) for file in lists for pid in file.read_text("ascii").split())


def running_children() -> dict[int, str]:
    """Returns the command of every child that is running, by pid."""
    commands = {pid: _command(pid) for pid in children()}
    return {pid: command for pid, command in commands.items() if command is not None}


def _command(pid: int) -> str | None:
    """Returns the command line of a process; None if it has exited."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if rest.split()[0] in "ZX":
        return None
    called = b" ".join(words).decode(errors="replace").strip()
    return called or name.partition("(")[2]  # a process that has just been started has no command line yet
