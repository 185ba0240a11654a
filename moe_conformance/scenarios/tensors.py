"""Tensors on their way back to the driver, and whether two hold the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare bytes, as NaN differs from itself and 0 equals -0."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def to_cpu(tensor: Tensor | None, flat: int | None = None) -> Tensor | None:
    """Return a copy that nobody else writes to, as rows of `flat` columns where that is given."""
    if tensor is None:
        return None
    copied = tensor.detach().cpu().clone()
    return copied if flat is None else copied.reshape(-1, flat)
