"""Copy tensors: to the CPU for the driver, or into memory with other strides; and compare them byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.workloads.records.workload import Stride

NOBODYS_ID = 2**40  # an id of no expert, which fills the gaps between ids


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


def laid_out(values: Tensor, stride: Stride | None) -> Tensor:
    """Return values (T, n) as a view of other memory, whose other elements are NaN or `NOBODYS_ID`.

    Without a stride the values themselves. An "expanded" tensor has strides of zero: one row in memory, or one number
    if all elements are equal.

    Raises:
        ValueError: the rows of a tensor to be expanded differ.
    """
    T, n = values.shape
    if stride is None:
        return values
    if stride == "expanded":
        return _expanded(values)
    shape = {"rows": (2 * T, n), "columns": (T, 2 * n), "transposed": (n, T), "packed": (T, n + 3)}[stride]
    memory = values.new_full(shape, torch.nan if values.is_floating_point() else NOBODYS_ID)
    views = {
        "rows": lambda: memory[::2],
        "columns": lambda: memory[:, ::2],
        "transposed": lambda: memory.T,
        "packed": lambda: memory[:, 1 : n + 1],
    }
    view = views[stride]()
    view.copy_(values)
    return view


def _expanded(values: Tensor) -> Tensor:
    if not len(values):
        return values
    once = values[:1, :1] if bool((values == values[0, 0]).all()) else values[:1]
    view = once.clone().expand(values.shape)
    if not torch.equal(view, values):
        raise ValueError("rows that differ cannot be expanded from one")
    return view
