"""Divide a run among machines: every cell belongs to exactly one shard, whatever else is selected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Shard `index` of `count`, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        """Return the form of the option, such as `2/3`."""
        return f"{self.index}/{self.count}"


def parse(text: str, option: str = "--shard") -> Shard:
    """Return the shard that the value of an option, such as `2/3`, names.

    Raises:
        ValueError: the value names none; the message says how to name one.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"{option} needs I/N with I from 1 to N, such as 2/3, not {text!r}")
    return Shard(int(found[1]), int(found[2]))


def divide(weights: Mapping[str, int], count: int) -> list[frozenset[str]]:
    """Return the names of each of `count` shards, with total weights that are as even as possible.

    Names are assigned by descending weight, to the shard with the least weight so far. The result is deterministic.

    >>> [sorted(names) for names in divide({"a": 5, "b": 3, "c": 3, "d": 1}, 2)]
    [['a', 'd'], ['b', 'c']]
    """
    names: list[set[str]] = [set() for _ in range(count)]
    loads = [0] * count
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        lightest = loads.index(min(loads))
        names[lightest].add(name)
        loads[lightest] += weights[name]
    return [frozenset(shard) for shard in names]
