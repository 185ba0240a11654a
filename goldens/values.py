"""What several chapters write and differentiate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def whole(values: Sequence[Any]) -> Tensor:
    """Return whole numbers, or booleans as 0 and 1, of any nesting, as int64."""
    return torch.tensor(np.array(values, dtype=np.int64))


def real(rng: np.random.Generator, *shape: int) -> Tensor:
    """Draw a float64 tensor."""
    return torch.from_numpy(rng.standard_normal(shape))


def leaf(value: Tensor) -> Tensor:
    """Return a copy that autograd differentiates by."""
    return value.detach().clone().requires_grad_()


def kept(value: Tensor) -> Tensor:
    """Return a copy to be stored, that shares neither graph nor memory."""
    return value.detach().clone()


def gradients(
    outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], upstream: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of the leaves by name, zeros of a leaf that nothing depends on."""
    for output in outputs:
        if not output.requires_grad:  # it depends on no leaf: no row was there
            output.requires_grad_()
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    return {name: kept(gradient) for name, gradient in zip(leaves, found, strict=True)}
