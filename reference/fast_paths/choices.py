"""Shortcuts: when the one for equal counts may be taken, and how often a shortcut was.

A shortcut that is taken where it does not hold gives wrong numbers of the right shape.

Sources: arithmetic: R / N rows per expert say nothing of each expert's rows; definition of a counter.
"""

from __future__ import annotations

from collections.abc import Sequence


def equal_counts(counts: Sequence[int] | None, rows: int) -> bool:
    """Return whether the shortcut for equal counts holds on a rank (FAST-12).

    Args:
        counts: rows of each of the N local experts, None if they are not known.
        rows: R.

    Degenerate: all counts 0 are equal, and so are those of no expert. Counts that are not known are not
    equal, also where N divides R.

    Raises:
        ValueError: a negative count, or a sum other than R.

    >>> equal_counts([3, 3], 6), equal_counts([2, 4], 6), equal_counts([0, 0], 0), equal_counts(None, 6)
    (True, False, True, False)
    """
    if counts is None:
        return False
    if any(n < 0 for n in counts) or sum(counts) != rows:
        raise ValueError(f"counts {list(counts)} do not say where {rows} rows belong")
    return len(set(counts)) <= 1


def decision_counts(taken: Sequence[bool]) -> tuple[int, int]:
    """Count decisions, (taken, not taken): together the calls that could have taken the shortcut.

    Decides: FAST-16. Source: definition of a counter.

    >>> decision_counts([True, False, True])
    (2, 1)
    """
    return sum(taken), len(taken) - sum(taken)


def look_up_counts(events: Sequence[str]) -> tuple[int, int]:
    """Count hits and misses of a cache of derived weights, (hits, misses).

    Decides: FAST-16. Source: definition of a counter.

    Rule: the first "look_up", and the first after each "change" of a weight, is a miss, every other a hit;
    "reset" sets the counters to 0 and leaves the cache as it is.

    >>> look_up_counts(["look_up", "look_up", "change", "change", "look_up"]), look_up_counts(["look_up", "reset"])
    ((1, 2), (0, 0))
    """
    hits = misses = 0
    warm = False
    for event in events:
        if event == "look_up":
            hits, misses = (hits + 1, misses) if warm else (hits, misses + 1)
            warm = True
        elif event == "change":
            warm = False
        elif event == "reset":
            hits = misses = 0
        else:
            raise ValueError(f"{event!r} is neither 'look_up', nor 'change' or 'reset'")
    return hits, misses
