"""Which layouts take turns in the full profile, and which part of what is left out is whose.

All workloads with all variants on all layouts of the full profile are 50,000 cases of native. Most differ from others
in the layout alone. So layouts of equally many ranks take turns: each variant runs each workload on one of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

Marks = frozenset[object]  # what a workload shows wherever it runs


def taken(cells: Sequence[Mapping[str, Marks]], variant: int) -> list[frozenset[str]]:
    """Return which of its workloads each cell runs, of cells that take turns.

    cells: of each, the marks of its workloads by name; the cells have one variant and equally many ranks. A workload
    runs in one of the cells that have it: where most of its marks have not been seen yet, else where least runs, else
    in the next cell for the next variant, so that variants meet it on different layouts. Then every cell gets what it
    still lacks, so that it shows each mark that it can.

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
    return [frozenset(each) for each in runs]


def lot(case: str, parts: int) -> int:
    """Return the part, from 1 on, to which a case falls by its id: a new workload moves no other to another part."""
    return zlib.crc32(case.encode()) % parts + 1
