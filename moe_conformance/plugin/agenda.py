"""In which order items run, and which case the ranks can begin while the driver still judges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from moe_conformance.plan import Case, Cell


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return what an item is parametrised with."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def case_of(item: pytest.Item) -> Case | None:
    """Return the case that an item reads."""
    case = parameters(item).get("case")
    return case if isinstance(case, Case) else None


def cell_of(item: pytest.Item) -> Cell | None:
    """Return the cell of an item, be it of a case or of its own draws."""
    case, cell = case_of(item), parameters(item).get("cell")
    return case.cell if case is not None else cell if isinstance(cell, Cell) else None


def sort(items: list[pytest.Item], positions: Mapping[str, int], examples: Collection[str]) -> None:
    """Sort by case, so that each runs once: examples of waivers first, then layout by layout.

    Args:
        items: Sorted in place.
        positions: The running order by the id of a case or cell.
        examples: Names of the items that are to be seen first.
    """
    urgent = {_place(item) for item in items if item.name in examples}

    def key(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        place = _place(item)
        if place is None:  # no case: where it was, after those that have one
            return (True, True, len(positions), True)
        return (place not in urgent, item.name not in examples, positions[place], "cell" in parameters(item))

    items.sort(key=key)


def followers(items: Sequence[pytest.Item], runs: Callable[[Case], bool]) -> dict[str, Case]:
    """Return by node id, for items of a case, the case that the ranks will run next: nothing else comes in between.

    Args:
        items: All items, in running order.
        runs: Whether a case is run at all.
    """
    found: dict[str, Case] = {}
    current: object = None
    following: object = None
    for item in reversed(items):
        need = _need(item, runs)
        if need is None:
            continue
        if need is not current:
            current, following = need, current
        if isinstance(need, Case) and isinstance(following, Case):
            found[item.nodeid] = following
    return found


def _need(item: pytest.Item, runs: Callable[[Case], bool]) -> object:
    """Return what an item wants the ranks for: its case, something else (itself), or nothing (None)."""
    names = getattr(item, "fixturenames", ())
    case = case_of(item)
    if case is not None:
        return case if "outcome" in names and runs(case) else None
    return item if "drive" in names or "group_lists" in names else None


def _place(item: pytest.Item) -> str | None:
    """Return the id of an item's case or cell."""
    place = case_of(item) or cell_of(item)
    return None if place is None else place.id
