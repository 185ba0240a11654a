"""Pairwise testing: few combinations of options in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = Mapping[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return rows with a value for every axis, such that every pair of values is in a row if an allowed row has it.

    Greedy: a row begins with the first pair that is left and takes, axis by axis, the value that adds most pairs that
    are left, the earlier value if several do. The same axes give the same rows.

    >>> rows = pairwise({"a": (1, 2), "b": (1, 2), "c": (1, 2)})
    >>> [tuple(row.values()) for row in rows]
    [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
    """
    rows: list[Row] = []
    left: dict[Any, None] = {}
    for one, other in combinations(axes, 2):
        for x, y in product(axes[one], axes[other]):
            left[(one, x), (other, y)] = None
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
    """Return a row completed with values of the missing axes, which are tried by the number of pairs that they add.

    None if no such row is allowed.
    """
    name = next((name for name in axes if name not in row), None)
    if name is None:
        return row if allowed(row) else None

    def meets(value: Any) -> int:
        mine = (name, value)
        return sum(((mine, held) in left) + ((held, mine) in left) for held in row.items())

    for value in sorted(axes[name], key=meets, reverse=True):
        if (found := _completed({**row, name: value}, axes, left, allowed)) is not None:
            return found
    return None
