"""What native's wire of eight bits makes of numbers that it cannot hold."""

from __future__ import annotations

import torch

from moe_conformance.backends.native.fused.fp8_wire import Float8Wire


class TestWire:
    def test_what_is_too_large_for_a_scale_arrives_as_no_number(self) -> None:
        """A float64 beyond float32 is not the largest number of eight bits."""
        sent_RD = torch.tensor([[1e39, 1.0], [2.0, torch.inf]], dtype=torch.float64)
        got_RD, _ = Float8Wire().unpack(Float8Wire().pack(sent_RD), 2, torch.float64)
        assert [[True, False], [False, True]] == got_RD.isnan().tolist()
