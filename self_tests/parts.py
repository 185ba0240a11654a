"""Divides the slow tests, which take most of the time of self_tests: planted bugs, ranks and other processes."""

from __future__ import annotations

import zlib
from pathlib import Path

from moe_conformance.workloads.selection.shards import Shard

PLANTED_BUGS = "planted_bugs"  # divided test by test: its files are few
# Rooms whose tests start ranks, a command line or another pytest. Divided file by file: tests of a file share ranks.
SLOW = frozenset({"backends", "correct_backends", "engine", "goldens", "installed", "plugin", "tools", "workloads"})


def holds(part: Shard, path: Path, name: str, *, parametrized: bool) -> bool:
    """Return whether a part has a test, by its file below self_tests and its name; every test is in one part or in all.

    >>> thirds = [Shard(index, 3) for index in (1, 2, 3)]
    >>> [holds(third, Path("planted_bugs/test_it.py"), "test[swapped]", parametrized=True) for third in thirds]
    [True, False, False]
    >>> [holds(third, Path("engine/test_ranks.py"), "test_it", parametrized=False) for third in thirds]
    [True, False, False]
    >>> [holds(third, Path("judging/test_findings.py"), "test_it", parametrized=True) for third in thirds]
    [True, True, True]
    """
    room = path.parts[0]
    if room == PLANTED_BUGS and parametrized:
        return _falls_in(part, name)
    return room not in SLOW or _falls_in(part, path.as_posix())


def _falls_in(part: Shard, text: str) -> bool:
    return zlib.crc32(text.encode()) % part.count == part.index - 1
