"""Gradients as chapters store them: by the names of what they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def leaf(value: Tensor) -> Tensor:
    """Return a copy that autograd differentiates by."""
    return value.detach().clone().requires_grad_()


def gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], upstream: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradient of every leaf under its name with a d before it, zeros if nothing depends on it."""
    for output in outputs:
        if not output.requires_grad:  # there was no row that depends on a leaf
            output.requires_grad_()
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}


def prefixed(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put a word before every name."""
    return {f"{prefix}.{name}": value for name, value in values.items()}
