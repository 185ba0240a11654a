"""Copy tensors to the CPU for the driver, and compare tensors byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes: NaN equals itself, and 0 differs from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))  # no view of a scalar


def to_cpu(tensor: Tensor | None, flat: int | None = None) -> Tensor | None:
    """Return a copy on the CPU, reshaped to rows of `flat` columns if that is given."""
    if tensor is None:
        return None
    copied = tensor.detach().cpu().clone()
    return copied if flat is None else copied.reshape(-1, flat)
