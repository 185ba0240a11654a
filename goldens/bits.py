"""Float64 numbers stored as the integers that their bits spell, where NaN, -0.0 and every bit have to come through."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPECIAL = (0, -(2**63), 0x3FF0 << 48, 0x7FF8 << 48, (0x7FF8 << 48) + 1, 0x7FF0 << 48, 1)
"""0.0, -0.0, 1.0, two NaN, infinity, the smallest subnormal."""


def draw_bits(rng: np.random.Generator, *shape: int) -> NDArray[np.int64]:
    """Return any bits, special numbers among them."""
    anything = rng.integers(-(2**63), 2**63 - 1, size=shape, endpoint=True)
    return np.where(rng.random(shape) < 0.3, rng.choice(np.array(SPECIAL), size=shape), anything)


def numbers(bits: Tensor) -> Tensor:
    """Return the float64 numbers that these int64 spell."""
    return bits.clone().view(torch.float64)


def spelled(values: Tensor) -> Tensor:
    """Return the int64 that spell these float64 numbers."""
    return values.contiguous().view(torch.int64)
