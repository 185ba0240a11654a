"""When the shortcut for equal counts is right, counters one event at a time, and the expert of each row.

Source of the last: Shazeer et al. 2017, equation 1 (a row's output is that of its expert, so that it has one).
"""

from __future__ import annotations

from collections.abc import Sequence

from self_tests.chapters.fast_paths.second.equal_splits import demand


def equal_counts(counts: Sequence[int] | None, rows: int) -> bool:
    """Are the counts known, and all the same?"""
    if counts is None:
        return False
    demand(all(count >= 0 for count in counts) and sum(counts) == rows, f"counts {counts} of {rows} rows")
    return all(one == other for one in counts for other in counts)


def decision_counts(taken: Sequence[bool]) -> tuple[int, int]:
    """How often a shortcut was taken, and how often not."""
    yes = no = 0
    for one in taken:
        if one:
            yes += 1
        else:
            no += 1
    return yes, no


def look_up_counts(events: Sequence[str]) -> tuple[int, int]:
    """Hits and misses of a cache that holds one value until that changes."""
    hits = misses = 0
    warm = False
    for event in events:
        demand(event in ("look_up", "change", "reset"), f"unknown {event}")
        if event == "look_up":
            hits, misses = (hits + 1, misses) if warm else (hits, misses + 1)
            warm = True
        elif event == "change":
            warm = False
        else:
            hits = misses = 0
    return hits, misses


def expert_of_each_row(counts: Sequence[int], experts: Sequence[int]) -> list[int]:
    """Return the global id of the expert of every row, given how many rows each local expert has, in order."""
    found: list[int] = []
    for place in range(len(counts)):
        for _ in range(counts[place]):
            found.append(experts[place])
    return found
