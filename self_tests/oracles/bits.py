"""Numbers as bit patterns, for oracles that must tell every pattern apart: NaN from NaN, 0.0 from -0.0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.int64]

# The integers that are as wide as the numbers.
PATTERNS = {torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float32: torch.int32}

# As bfloat16: 0.0, -0.0, 1.0, two NaN, infinity, the smallest subnormal.
SPECIAL = [0x0000, -0x8000, 0x3F80, 0x7FC0, 0x7FC1, 0x7F80, 0x0001]


def patterns(random: np.random.Generator, shape: Sequence[int]) -> Bits:
    """Patterns of 16 bits, special ones among them."""
    made = random.integers(-(2**15), 2**15, size=shape)
    return np.where(random.random(shape) < 0.3, random.choice(SPECIAL, size=shape), made).astype(np.int64)


def numbers(bits: Bits, dtype: torch.dtype) -> Tensor:
    """The numbers that these patterns of 16 bits spell, in the upper bits of a wider number."""
    pattern = PATTERNS[dtype]
    return (torch.from_numpy(bits.copy()) << (8 * pattern.itemsize - 16)).to(pattern).view(dtype)


def spelled(tensor: Tensor) -> Bits:
    """The patterns of 16 bits that spell these numbers; lower bits, which `numbers` left empty, stay so."""
    pattern = PATTERNS[tensor.dtype]
    wide = tensor.detach().contiguous().view(pattern).to(torch.int64)
    shift = 8 * pattern.itemsize - 16
    assert not bool((wide & ((1 << shift) - 1)).any()), tensor
    return (wide >> shift).numpy()
