"""The order in which items run, and the cases that ranks can begin while the driver still judges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import inf
from typing import Any

import pytest

from moe_conformance.plugin.case_items import Check
from moe_conformance.plugin.options import Options, Unusable
from moe_conformance.workloads.plan import Case, Cell, Plan
from moe_conformance.workloads.selection import shards
from moe_conformance.workloads.selection.power import Place
from moe_conformance.workloads.selection.profiles import too_large

# Shards of so many layouts get whole ones: what the oracles say of a layout's workloads serves all its variants.
_LAYOUTS_OF_A_SHARD = 6


def parameters(item: pytest.Item) -> Mapping[str, Any]:
    """Return what an item is parametrised with."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def case_of(item: pytest.Item) -> Case | None:
    """Return the case that an item reads."""
    case = getattr(item, "case", None)
    return case if isinstance(case, Case) else None


def cell_of(item: pytest.Item) -> Cell | None:
    """Return the cell of an item of a case, or of an item that draws workloads."""
    case, cell = case_of(item), parameters(item).get("cell")
    return case.cell if case is not None else cell if isinstance(cell, Cell) else None


def scope_of(item: pytest.Item) -> str | None:
    """Return the id of an item's cell: "" for a check without a cell, None for an item that is no check."""
    cell = cell_of(item)
    if cell is not None:
        return cell.id
    return None if item.get_closest_marker("requirement") is None else ""


def of_others(item: pytest.Item, other_cells: Collection[str]) -> bool:
    """Whether an item is run by other shards: its cell is theirs, or it stands for a check without a case here."""
    without = (isinstance(item, Check) or "cell" in parameters(item)) and cell_of(item) is None
    return without or scope_of(item) in other_cells


def loads(plan: Plan, ranks: int) -> dict[str, int]:
    """Return how many cases each cell runs on that many ranks; "" holds the checks that have no cell."""
    count = dict.fromkeys(["", *(cell.id for cell in plan.cells)], 0)
    for case in plan.cases:
        count[case.cell.id] += too_large(case.cell.layout, ranks) is None
    return count


def other_cells(plan: Plan, options: Options) -> frozenset[str]:
    """Return the cells that the requested shard leaves to the others.

    Raises:
        Unusable: there are fewer cells than shards.
    """
    shard = options.part
    if shard is None:
        return frozenset()
    count = loads(plan, options.ranks)
    if shard.count > sum(cases > 0 for cases in count.values()):
        raise Unusable(f"--shard {shard}: only {sum(map(bool, count.values()))} cells have cases; take fewer shards")
    layout_of = {"": ""} | {cell.id: cell.layout.name for cell in plan.cells}
    by_layout = dict.fromkeys(layout_of.values(), 0)
    for cell, cases in count.items():
        by_layout[layout_of[cell]] += cases
    if len(by_layout) < _LAYOUTS_OF_A_SHARD * shard.count:
        return frozenset(count) - shards.divide(count, shard.count)[shard.index - 1]
    layouts_of_shard = shards.divide(by_layout, shard.count)[shard.index - 1]
    return frozenset(cell for cell in count if layout_of[cell] not in layouts_of_shard)


def sort(items: list[pytest.Item], examples: Collection[str], power: Mapping[Place, int]) -> None:
    """Sort by case in running order, a cell's own items after its cases; in place.

    Cases of which `examples` names an item come first, and that item first of all: those of waivers are to be seen
    before anything else. Then come those that `power` numbers, by number: they detect most bugs for their seconds. The
    others of each number of ranks are spread over the rest of the run: while ranks of one number wait for each other,
    those of another and the driver have the processors. Items without a case come last.
    """
    placed = [(place, item) for item in items if (place := _place(item)) is not None]
    placed.sort(key=lambda entry: (entry[0], entry[1].name not in examples))
    urgent = {place for place, item in placed if item.name in examples}
    first = [item for place, item in placed if place in urgent]
    last = [item for item in items if _place(item) is None]
    others = [(power.get(_named(item), inf), place, item) for place, item in placed if place not in urgent]
    powerful = [item for number, _, item in sorted(others, key=lambda entry: entry[0]) if number < inf]
    usual = [(place, item) for number, place, item in others if number == inf]
    items[:] = [*first, *powerful, *_spread(usual), *last]


def _spread(placed: Iterable[tuple[tuple[float, ...], pytest.Item]]) -> Iterator[pytest.Item]:
    """Yield items that are sorted by place so that those of every number of ranks are evenly among the others."""
    by_ranks: dict[int, list[list[pytest.Item]]] = {}
    for _, of_place in groupby(placed, key=lambda entry: entry[0]):
        together = [item for _, item in of_place]
        cell = cell_of(together[0])
        assert cell is not None  # it has a place
        by_ranks.setdefault(cell.layout.world, []).append(together)
    spread = [
        (number / len(groups), world, together)
        for world, groups in by_ranks.items()
        for number, together in enumerate(groups)
    ]
    for *_, together in sorted(spread, key=lambda entry: entry[:2]):
        yield from together


def followers(items: Sequence[pytest.Item], runs: Callable[[Case], bool], most: int) -> dict[str, tuple[Case, ...]]:
    """Return by node id, for items of a case, the cases that the ranks will run next.

    Args:
        items: All items, in running order.
        runs: Whether a case is run at all.
        most: How many cases of each number of ranks are returned at most.
    """
    found: dict[str, tuple[Case, ...]] = {}
    current: Case | None = None
    following: dict[int, tuple[Case, ...]] = {}  # by number of ranks
    for item in reversed(items):
        case = _run_case(item, runs)
        if case is None:
            continue
        if case is not current:
            if current is not None:
                world = current.workload.layout.world
                following[world] = (current, *following.get(world, ()))[:most]
            current = case
        found[item.nodeid] = tuple(chain.from_iterable(following.values()))
    return found


def _run_case(item: pytest.Item, runs: Callable[[Case], bool]) -> Case | None:
    """Return the case that ranks run for an item; None if none is."""
    case = case_of(item)
    reads = {"outcome", "reading"} & set(getattr(item, "fixturenames", ()))
    return case if case is not None and reads and runs(case) else None


def _named(item: pytest.Item) -> Place:
    """Return the variant, layout and workload of an item's case; empty names if it has none."""
    case = case_of(item)
    return ("", "", "") if case is None else (case.cell.variant, case.cell.layout.name, case.workload.name)


def _place(item: pytest.Item) -> tuple[float, ...] | None:
    """Return the sort key of an item: the place of its case or cell in running order; None without either."""
    case, cell = case_of(item), cell_of(item)
    if case is not None:
        return (case.cell.number, *case.place)
    return None if cell is None else (cell.number, inf)
