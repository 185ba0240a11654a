"""Divides the tests of planted bugs: all of them take longer than everything else in self_tests together."""

from __future__ import annotations

import zlib

from moe_conformance.workloads.selection.shards import Shard


def holds(part: Shard, name: str) -> bool:
    """Return whether a part has the test of that name; every test is in one part, whatever other tests there are.

    >>> [holds(Shard(index, 3), "test_a_bug[swapped]") for index in (1, 2, 3)]
    [False, False, True]
    """
    return zlib.crc32(name.encode()) % part.count == part.index - 1
