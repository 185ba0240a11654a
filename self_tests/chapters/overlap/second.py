"""OVLP-05, written a second time: loops over NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def reordered_sum_bound(added: Sequence[NDArray[np.float64]], unit: float) -> NDArray[np.float64]:
    """Return by how much two sums may differ: each of M - 1 additions is off by at most u times all magnitudes.

    Each of the sums may be off by (M - 1) u / (1 - (M - 1) u) sum |g|, for which M u sum |g| is taken; the sum of two
    numbers is the same in any order. Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    bound = np.zeros_like(added[0])
    for place in np.ndindex(bound.shape):
        magnitude = 0.0
        for each in added:
            magnitude += abs(each[place])  # type: ignore[assignment]
        if len(added) > 2:
            bound[place] = 2 * len(added) * unit * magnitude
    return bound
