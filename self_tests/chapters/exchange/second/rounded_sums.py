"""What combine may add up where rows have fewer bits than weights, in NumPy loops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.float64]


def bfloat16(value: float) -> float:
    """Round a float32 to the nearest number with 8 significant bits, to even where two are as near."""
    mantissa, exponent = np.frexp(np.float32(value))
    return float(np.ldexp(np.rint(np.ldexp(np.float64(mantissa), 8)), int(exponent) - 8))


def sums(x_TD: Bits, owners_TK: NDArray[np.int64], w_TK: Bits, *, rounded: bool, products: str) -> Bits:
    """Return the exact sums, with weights rounded or not and products stored nowhere, by pair or by rank."""
    y_TD = np.zeros_like(x_TD)
    for t, d in np.ndindex(*x_TD.shape):
        weights = [bfloat16(w) if rounded else float(w) for w in w_TK[t]]
        slots = [(int(owner), w) for owner, w in zip(owners_TK[t], weights, strict=True) if owner >= 0]
        if products == "nowhere":
            y_TD[t, d] = sum(w * x_TD[t, d] for _, w in slots)
        elif products == "pairs":
            y_TD[t, d] = sum(bfloat16(float(np.float32(w) * np.float32(x_TD[t, d]))) for _, w in slots)
        else:
            for rank in sorted({owner for owner, _ in slots}):
                total = np.float32(0)
                for owner, w in slots:
                    if owner == rank:
                        total = np.float32(total + np.float32(w))
                y_TD[t, d] += bfloat16(float(total * np.float32(x_TD[t, d])))
    return y_TD
