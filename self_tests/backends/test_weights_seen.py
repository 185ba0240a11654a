"""In what a router computes, by its weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_conformance.backends.weights_seen import WeightsSeen

EXACT = torch.tensor([0.5, 0.25], dtype=torch.float64)
FINE = EXACT + 2.0**-40


class Returns(nn.Module):
    """A router that returns what it is given, as weights, beside something else."""

    def forward(self, weights: Tensor) -> tuple[str, Tensor]:
        """Return the weights second."""
        return "logits", weights


class TestWeightsSeen:
    @pytest.mark.parametrize(
        ("calls", "told"),
        [
            ((), None),
            ((EXACT[:0],), None),
            ((EXACT,), torch.float32),
            ((FINE,), torch.float64),
            ((FINE, EXACT), torch.float64),
            ((EXACT, FINE), torch.float64),
            ((FINE.float(),), torch.float32),
            ((FINE.bfloat16(),), None),
        ],
    )
    def test_float64_is_what_float32_cannot_hold(self, calls: tuple[Tensor, ...], told: torch.dtype | None) -> None:
        """One weight that is no float32 number shows float64; no weights, or half-precision ones, show nothing."""
        router = Returns()
        seen = WeightsSeen(router, 1)
        for weights in calls:
            router(weights)
        assert told == seen.dtype
