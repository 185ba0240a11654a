"""Finds the dtype in which a router computes its scores, from the weights that it returns; for adapters of any library.

A library may compute in float32 and pass float64: then all weights are float32 numbers. Weights that it normalises
or scales afterwards, in float64, do not show that. A half-precision weight may be rounded from anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WeightsSeen:
    """Observes the weights that a router returns."""

    def __init__(self, router: nn.Module, place: int) -> None:
        """Observe element `place` of the results of the router from now on."""
        self._place = place
        self._dtype: torch.dtype | None = None
        router.register_forward_hook(self._look)

    def _look(self, router: nn.Module, handed: Any, returned: Any) -> None:
        del router, handed
        weights = returned[self._place].detach()
        if weights.numel() and weights.dtype in (torch.float32, torch.float64):
            narrow = torch.equal(weights, weights.float().to(weights.dtype))
            self._dtype = torch.float32 if narrow and self._dtype != torch.float64 else torch.float64

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype as far as it was observed; None if no weight has shown it."""
        return self._dtype
