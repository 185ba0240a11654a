"""Limits by design: which may be declared, what they leave out, and what they do not."""

from __future__ import annotations

import pytest

from moe_conformance.contract import Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.features import broken, cell_limits
from self_tests.trial_runs import Run

WHOLE = Limit("sharded_experts", (False,), "experts are never split", proof="design")
EP2_ETP2 = Layout(4, ep=2, etp=2)


class TestByDesign:
    def test_a_limit_within_layouts_is_none(self) -> None:
        """A library that has no bfloat16, or no uneven tokens, refuses them, or is not tried."""
        with pytest.raises(
            ValueError, match="'design', which is for spread_experts and sharded_experts alone; a limit on"
        ):
            Limit("dtype", (), "no reason", proof="design")

    def test_a_proof_that_there_is_not_is_refused(self) -> None:
        """The three that there are are named."""
        with pytest.raises(ValueError, match="is 'by design'; allowed: 'refused', 'undefined', 'design'"):
            Limit("sharded_experts", (False,), "no reason", proof="by design")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("workload", "left_out"), [("even", True), ("own-even", True), ("layer-even", True), ("route-softmax", False)]
    )
    def test_exchange_experts_and_layer_are_left_out(self, workload: str, left_out: bool) -> None:
        """A router is on all layouts what it is: it is judged on those that have no exchange."""
        drawn = Run("native", "alltoall", EP2_ETP2, workload).drawn()
        assert left_out == (broken((WHOLE,), drawn, "cpu") == WHOLE)
        assert () == cell_limits((WHOLE,), EP2_ETP2)

    def test_other_layouts_are_not_left_out(self) -> None:
        """The limit is on its own axis."""
        drawn = Run("native", "alltoall", Layout(2, ep=2), "even").drawn()
        assert broken((WHOLE,), drawn, "cpu") is None
