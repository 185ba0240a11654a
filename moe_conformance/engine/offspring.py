"""The processes that a process has started, and those that it adopts: whatever its offspring leaves behind."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
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


def living() -> dict[int, str]:
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
