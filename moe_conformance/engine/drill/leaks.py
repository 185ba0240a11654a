"""Counts what a fault must not leave on the machine: processes, zombies, file descriptors, threads of the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 3.0  # a killed process takes a moment to go


@dataclass(frozen=True)
class Holdings:
    """What the driver and the process that forks ranks hold, beside the ranks themselves."""

    processes: frozenset[int]  # all that have the mark, less the ranks
    zombies: frozenset[int]  # children of either that nobody has buried
    driver_descriptors: int
    driver_threads: int
    fork_server_descriptors: int


def holdings(mark: str, fork_server: int, ranks: Collection[int]) -> Holdings:
    """Counts now. `mark` is an environment variable with its value, which all processes of the engine inherit."""
    return Holdings(
        frozenset(pid for pid in _pids() if _has(pid, mark)) - frozenset(ranks),
        frozenset(pid for pid in _pids() if _parent_of_zombie(pid) in (os.getpid(), fork_server)),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(os.listdir(f"/proc/{fork_server}/fd")),
    )


def settled(before: Holdings, mark: str, fork_server: int, ranks: Collection[int]) -> Holdings:
    """Counts until it is as before, with a moment of patience."""
    until = time.monotonic() + _PATIENCE_S
    while (now := holdings(mark, fork_server, ranks)) != before and time.monotonic() < until:
        time.sleep(0.01)
    return now


def differences(before: Holdings, now: Holdings) -> list[str]:
    """Says what there is more, or less, than before."""
    after = vars(now)
    return [f"{name}: {old} before, {after[name]} after" for name, old in vars(before).items() if old != after[name]]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is another user's
        return False


def _parent_of_zombie(pid: int) -> int | None:
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(parent) if state == "Z" else None
