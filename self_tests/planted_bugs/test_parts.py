"""Tests of the division of planted bugs."""

from __future__ import annotations

from moe_conformance.workloads.selection.shards import Shard
from self_tests.planted_bugs import parts, plants


def test_every_test_is_in_one_part_of_about_the_same_size() -> None:
    """By the names of all plants: each is in one part, and no part is twice as large as another."""
    names = [plant.name for plant in plants()]
    found = [[name for name in names if parts.holds(Shard(index, 3), name)] for index in (1, 2, 3)]
    assert sorted(names) == sorted(name for part in found for name in part)
    assert max(map(len, found)) < 2 * min(map(len, found))
