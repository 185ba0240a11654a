"""Second oracle of the expert of each row of a grouped call, in explicit loops.

Source: Shazeer et al. 2017, equation 1: a row's output is its expert's, so that rows have one expert each.
"""

from __future__ import annotations

from collections.abc import Sequence


def expert_of_each_row(counts: Sequence[int], experts: Sequence[int]) -> list[int]:
    """Return the global id of the expert of every row, given how many rows each local expert has, in order."""
    found: list[int] = []
    for place in range(len(counts)):
        for _ in range(counts[place]):
            found.append(experts[place])
    return found
