"""Random pairs of strided tensors, in one memory or in two, and whether they have a byte in common, byte by byte.

The views are of one torch storage, of slices of one NumPy array, of DLPack imports, of `torch.frombuffer` over one
buffer, or of separate allocations. A byte of memory is painted by the one view and looked for by the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

KINDS = ("one storage", "NumPy", "DLPack", "frombuffer", "separate")
_ELEMENTS = 48  # of a memory, float32


@dataclass(frozen=True)
class Pair:
    """Two tensors (N, D), how they were made, and the truth about them."""

    kind: str
    out: Tensor
    x: Tensor
    share: bool  # some byte is in both


@dataclass(frozen=True)
class _View:
    """Elements from the beginning of the memory to the first, rows and columns, and the steps between them."""

    first: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    def paint(self, bytes_: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return this view of one byte per element of a memory."""
        return np.lib.stride_tricks.as_strided(bytes_[self.first :], self.shape, self.strides)


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """Yield so many pairs, of every kind in turn."""
    chance = random.Random(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        views = (_view(chance), _view(chance))
        memory = torch.zeros(_ELEMENTS)
        other = torch.zeros(_ELEMENTS) if kind == "separate" else memory
        painted = np.zeros(_ELEMENTS, dtype=bool)
        views[0].paint(painted)[...] = True
        share = kind != "separate" and bool(views[1].paint(painted).any())
        yield Pair(kind, _made(kind, memory, views[0]), _made(kind, other, views[1]), share)


def _view(chance: random.Random) -> _View:
    """Draw a view that fits; some are contiguous, some have no element."""
    while True:
        shape = (chance.randint(0 if chance.random() < 0.05 else 1, 4), chance.randint(1, 4))
        contiguous = (shape[1], 1)
        strides = contiguous if chance.random() < 0.5 else (chance.randint(0, 9), chance.randint(0, 4))
        reach = sum((max(size, 1) - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if reach < _ELEMENTS:
            return _View(chance.randint(0, _ELEMENTS - 1 - reach), shape, strides)


def _made(kind: str, memory: Tensor, view: _View) -> Tensor:
    """Return a view of the memory; of the other libraries' kinds, of a storage of its own over it."""
    if kind == "NumPy":
        part = torch.from_numpy(memory.numpy()[view.first :])
    elif kind == "DLPack":
        part = from_dlpack(memory[view.first :])
    elif kind == "frombuffer":
        part = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=4 * view.first)
    else:
        return memory.as_strided(view.shape, view.strides, view.first)
    return part.as_strided(view.shape, view.strides)
