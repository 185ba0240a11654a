"""Tensors on their way back to the driver, and whether two hold the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare bytes, as NaN differs from itself and 0 equals -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (a, b)))  # no view of a scalar


def to_cpu(tensor: Tensor | None, flat: int | None = None) -> Tensor | None:
    """Return a copy that nothing else writes to, as rows of `flat` columns where that is given."""
    if tensor is None:
        return None
    copied = tensor.detach().cpu().clone()
    return copied if flat is None else copied.reshape(-1, flat)
