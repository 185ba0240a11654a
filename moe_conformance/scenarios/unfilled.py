"""Write NaN into the places of a low-latency buffer that no row fills, and into their gradients.

Experts may leave any value there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Spoil(torch.autograd.Function):
    """Writes NaN into rows and, in the backward, into their gradient, where a mask is set."""

    @staticmethod
    def forward(ctx: Any, rows_NCD: Tensor, unfilled_NC1: Tensor) -> Tensor:
        ctx.unfilled_NC1 = unfilled_NC1
        return rows_NCD.masked_fill(unfilled_NC1, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].masked_fill(ctx.unfilled_NC1, torch.nan), None


def spoil_unfilled(rows_NCD: Tensor, counts_N: Tensor) -> Tensor:
    """Return rows by place, with NaN in the places of every expert n from counts_n on."""
    places_C = torch.arange(rows_NCD.shape[1], device=rows_NCD.device)
    spoilt: Tensor = _Spoil.apply(  # type: ignore[no-untyped-call]
        rows_NCD, (places_C >= counts_N.unsqueeze(1)).unsqueeze(2)
    )
    return spoilt
