"""Distribute the workloads of the full profile over layouts with the same number of ranks.

All workloads with all variants on all layouts of the full profile are 50,000 cases of native, most of which differ from
others in the layout only. So every variant runs every workload on one of the layouts with the same number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

Marks = frozenset[object]  # features of a workload on every layout


def taken(cells: Sequence[Mapping[str, Marks]], variant: int) -> list[frozenset[str]]:
    """Return, for every cell, the names of the workloads that it runs.

    cells: for each, the marks of its workloads by name; all cells have one variant and the same number of ranks. A
    workload runs in one of the cells that have it: the one in which most of its marks are new, then the one with fewest
    workloads, then the next cell for the next variant, so that variants run it on different layouts. Then workloads are
    added to every cell until it has all marks that are possible there.

    >>> cells = [{"even": frozenset("x"), "odd": frozenset("x")}] * 2
    >>> [sorted(cell) for cell in taken(cells, 0)], [sorted(cell) for cell in taken(cells, 1)]
    ([['even'], ['odd']], [['odd'], ['even']])
    """
    runs: list[set[str]] = [set() for _ in cells]
    seen: list[set[object]] = [set() for _ in cells]
    for name in dict.fromkeys(name for cell in cells for name in cell):
        worth = {
            index: (-len(cell[name] - seen[index]), len(runs[index]), (index - variant) % len(cells))
            for index, cell in enumerate(cells)
            if name in cell
        }
        best = min(worth, key=lambda index: worth[index])
        runs[best].add(name)
        seen[best] |= cells[best][name]
    for index, cell in enumerate(cells):
        for name, marks in cell.items():
            if marks - seen[index]:
                runs[index].add(name)
                seen[index] |= marks
    return [frozenset(names) for names in runs]


def lot(case: str, parts: int) -> int:
    """Return the part of a case, from 1 to `parts`, by a hash of its id: a new workload moves no other case."""
    return zlib.crc32(case.encode()) % parts + 1
