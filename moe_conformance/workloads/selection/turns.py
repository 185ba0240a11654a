"""Which layouts take turns in the full profile, and which part of what is left out is whose.

All workloads with all variants on all layouts of the full profile are 50,000 cases of native. Most differ from others
in the layout alone. So layouts of equally many ranks take turns: each variant runs each workload on one of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def taken(names: Sequence[Sequence[str]], variant: int) -> list[frozenset[str]]:
    """Return which of its workloads each cell runs, of cells that take turns.

    names: of the workloads that there are in each of the cells, which have one variant and equally many ranks. A
    workload runs in one of the cells that have it, picked by its name, and with the next variant in the next of these:
    variants meet a workload on different layouts.

    >>> taken([["even"], ["even"]], 0) == taken([["even"], ["even"]], 1)[::-1]
    True
    """
    found: list[set[str]] = [set() for _ in names]
    for name in {name for some in names for name in some}:
        having = [index for index, some in enumerate(names) if name in some]
        found[having[(zlib.crc32(name.encode()) + variant) % len(having)]].add(name)
    return [frozenset(some) for some in found]


def lot(case: str, parts: int) -> int:
    """Return the part, from 1 on, to which a case falls by its id: a new workload moves no other to another part."""
    return zlib.crc32(case.encode()) % parts + 1
