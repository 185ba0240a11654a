"""Tensors as parts of one flat tensor for each dtype, bit for bit, for a file of safetensors.

A tensor of a few elements would take more bytes for its name than for itself. Equal parts are stored once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMED = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPES = {name: value for name, value in _NAMED.items() if not name.startswith("q")}  # quantised ones have scales

# Others are stored as bytes: not every version of safetensors has them.
_STORED_AS_THEY_ARE = frozenset(
    ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
)
_MOST = 1 << 31  # elements of a tensor: an expanded one has more than are stored


class BadRecording(ValueError):
    """What is to be stored or read is no recorded outcome; the message says where."""


class Pools:
    """Collects tensors."""

    def __init__(self) -> None:
        """Hold none yet."""
        self._bytes: dict[str, bytearray] = {}
        self._known: dict[tuple[str, bytes], int] = {}

    def put(self, tensor: Tensor) -> list[Any]:
        """Store a tensor and return its place: dtype, first element, shape, and strides unless it is contiguous.

        Strides are kept of what lies in another order or is expanded; gaps between elements are closed.

        Raises:
            BadRecording: its values cannot be read as bytes.
        """
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        once = tensor.detach()
        for dim, stride in enumerate(tensor.stride()):
            once = once.narrow(dim, 0, 1) if stride == 0 and shape[dim] > 1 else once
        try:
            values = once.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            content = bytes(_flat_bytes(values.flatten()).numpy())
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise BadRecording(f"a tensor of {dtype} cannot be stored: {error}") from error
        held = self._bytes.setdefault(dtype, bytearray())
        if (dtype, content) not in self._known:
            self._known[dtype, content] = len(held) // tensor.element_size()
            held += content
        place = [dtype, self._known[dtype, content], shape]
        return place if tensor.is_contiguous() else [*place, _closed(list(once.shape), tensor.stride())]

    def contents(self) -> Iterator[tuple[str, bytearray]]:
        """Yield the bytes of all tensors, by dtype."""
        yield from sorted(self._bytes.items())

    def flat(self) -> dict[str, Tensor]:
        """Return what is stored, by dtype."""
        return {dtype: _flat(dtype, content) for dtype, content in self.contents()}


def take(pools: Mapping[str, Tensor], place: Any) -> Tensor:
    """Return a new tensor with what is stored at a place.

    Raises:
        BadRecording: it is no place of these tensors.
    """
    dtype, first, shape, strides = _parsed(place)
    if dtype not in DTYPES or dtype not in pools:
        raise BadRecording(f"no tensors of {dtype!r} are stored")
    once = shape
    if strides is not None:
        once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
        if not _is_dense(once, strides):
            raise BadRecording(f"{place!r} is no place of a tensor: such strides are not stored")
    held, size = _flat_bytes(pools[dtype].flatten()), DTYPES[dtype].itemsize
    begin, end = first * size, (first + math.prod(once)) * size
    if end > len(held) or max((1, *shape, math.prod(shape))) > _MOST:
        raise BadRecording(f"{place!r} is beyond the stored elements")
    values = held[begin:end].clone().view(DTYPES[dtype]).reshape(once)
    if strides is None:
        return values
    return torch.empty_strided(once, strides, dtype=values.dtype).copy_(values).expand(shape)


def _parsed(place: Any) -> tuple[str, int, list[int], list[int] | None]:
    """Return dtype, first element, shape and strides of a place."""
    if not (isinstance(place, list) and len(place) in (3, 4) and isinstance(place[0], str)):
        raise BadRecording(f"{place!r} is no place of a tensor")
    dtype, first, shape, *strides = place
    for numbers in ([first], shape, *strides):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise BadRecording(f"{place!r} is no place of a tensor: sizes are whole numbers")
    if strides and len(strides[0]) != len(shape):
        raise BadRecording(f"{place!r} is no place of a tensor: it has other dims than strides")
    return dtype, first, shape, strides[0] if strides else None


def _flat_bytes(flat: Tensor) -> Tensor:
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _flat(dtype: str, content: bytearray) -> Tensor:
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return flat.view(DTYPES[dtype]) if dtype in _STORED_AS_THEY_ARE else flat


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps, in the order of some permutation of the dims."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


def _closed(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return strides of the same order without gaps; those of expanded dims stay 0."""
    closed, expected = [0] * len(shape), 1
    for dim in sorted((dim for dim, stride in enumerate(strides) if stride), key=lambda dim: (strides[dim], -dim)):
        closed[dim] = expected
        expected *= max(shape[dim], 1)
    return closed
