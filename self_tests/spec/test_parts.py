"""Tests of the division of the slow tests."""

from __future__ import annotations

from pathlib import Path

from moe_conformance.workloads.selection.shards import Shard
from self_tests import parts
from self_tests.planted_bugs import plants

SELF_TESTS = Path(parts.__file__).parent
THIRDS = [Shard(index, 3) for index in (1, 2, 3)]


def test_every_planted_bug_is_in_one_part_of_about_the_same_size() -> None:
    """By the names of all plants: no part is twice as large as another."""
    file, names = Path(parts.PLANTED_BUGS, "test_planted_bugs.py"), [plant.name for plant in plants()]
    found = [[name for name in names if parts.holds(third, file, name, parametrized=True)] for third in THIRDS]
    assert sorted(names) == sorted(name for part in found for name in part)
    assert max(map(len, found)) < 2 * min(map(len, found))


def test_every_slow_file_is_in_one_part_and_every_other_in_all() -> None:
    """A file is never divided; the rooms that are named exist."""
    files = [path.relative_to(SELF_TESTS) for path in SELF_TESTS.rglob("test_*.py")]
    assert parts.SLOW <= {path.parts[0] for path in files}
    for file in files:
        held = [parts.holds(third, file, "test_it", parametrized=False) for third in THIRDS]
        assert (1 if file.parts[0] in parts.SLOW else 3) == sum(held)
