"""Counts the resources that a fault must not leak: processes, zombies, descriptors, threads of the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 3.0  # a killed process takes some time to exit


@dataclass(frozen=True)
class Resources:
    """The resources of the driver and the fork server, without those of the ranks."""

    processes: frozenset[int]  # all that have the mark, without the ranks
    zombies: frozenset[int]  # children of either that were not reaped
    driver_descriptors: int
    driver_threads: int
    fork_server_descriptors: int


def count_resources(mark: str, fork_server: int, ranks: Collection[int]) -> Resources:
    """Counts now. `mark` is an environment variable with its value, inherited by all of the engine's processes."""
    return Resources(
        frozenset(pid for pid in _pids() if _has(pid, mark)) - frozenset(ranks),
        frozenset(pid for pid in _pids() if _parent_of_zombie(pid) in (os.getpid(), fork_server)),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(os.listdir(f"/proc/{fork_server}/fd")),
    )


def settled(before: Resources, mark: str, fork_server: int, ranks: Collection[int]) -> Resources:
    """Counts until the result equals `before`, for at most 3 seconds; returns the latest count."""
    until = time.monotonic() + _PATIENCE_S
    while (now := count_resources(mark, fork_server, ranks)) != before and time.monotonic() < until:
        time.sleep(0.01)
    return now


def differences(before: Resources, now: Resources) -> list[str]:
    """Returns one line for each count that has changed."""
    after = vars(now)
    return [f"{name}: {old} before, {after[name]} after" for name, old in vars(before).items() if old != after[name]]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just exited, or is another user's
        return False


def _parent_of_zombie(pid: int) -> int | None:
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(parent) if state == "Z" else None
