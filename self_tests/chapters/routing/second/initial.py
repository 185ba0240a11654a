"""Parameters of new routers, by hand: element by element, and byte by byte."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def usable(value: NDArray[np.float32], *, by_expert: bool) -> str:
    """What is wrong with a parameter, or nothing."""
    for number in value.reshape(-1).tolist():
        if math.isnan(number) or math.isinf(number):
            return "is not finite"
    if not by_expert or len(value) < 2:
        return ""
    for row in value[1:]:
        for number, first in zip(row.tolist(), value[0].tolist(), strict=True):
            if number != first:
                return ""
    return "is the same for all experts"


def differing(replicas: Mapping[int, NDArray[np.float32]]) -> list[int]:
    """Ranks whose bytes are others than those of the lowest rank."""
    ranks = sorted(replicas)
    found = []
    for rank in ranks[1:]:
        one, first = replicas[rank], replicas[ranks[0]]
        if one.shape != first.shape or one.dtype != first.dtype or one.tobytes() != first.tobytes():
            found.append(rank)
    return found
