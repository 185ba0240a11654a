"""Combinations in which every pair of values occurs: far fewer than the product of all values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = Mapping[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return rows, a value of each axis, such that every two values meet in a row if there is an allowed one of both.

    Greedy: each row begins with the first pair that is left and takes, axis by axis, the value that meets most others
    that are left, the earlier one if several do. The same axes give the same rows.

    >>> rows = pairwise({"a": (1, 2), "b": (1, 2), "c": (1, 2)})
    >>> [tuple(row.values()) for row in rows]
    [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
    """
    rows: list[Row] = []
    left = dict.fromkeys(
        ((one, x), (other, y)) for one, other in combinations(axes, 2) for x in axes[one] for y in axes[other]
    )
    while left:
        pair = next(iter(left))
        row = _completed(dict(pair), axes, left, allowed)
        if row is None:  # no allowed row has both
            del left[pair]
            continue
        rows.append({name: row[name] for name in axes})
        for met in combinations(rows[-1].items(), 2):
            left.pop(met, None)
    return rows


def _completed(
    row: dict[str, Any], axes: Mapping[str, Sequence[Any]], left: Mapping[Any, None], allowed: Callable[[Row], bool]
) -> dict[str, Any] | None:
    """Return the row with values of the axes that it lacks, those first that meet most of what is left.

    None if no such row is allowed.
    """
    name = next((name for name in axes if name not in row), None)
    if name is None:
        return row if allowed(row) else None

    def meets(value: Any) -> int:
        mine = (name, value)
        return sum(((mine, each) in left) + ((each, mine) in left) for each in row.items())

    for value in sorted(axes[name], key=meets, reverse=True):
        if (found := _completed({**row, name: value}, axes, left, allowed)) is not None:
            return found
    return None
