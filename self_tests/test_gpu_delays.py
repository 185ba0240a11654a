"""Delays of a GPU's streams: what is decided without one."""

from __future__ import annotations

import pytest

from moe_conformance.engine import EngineError
from moe_conformance.engine.gpu.delays import MODES, late, require_gpu


class TestDelays:
    @pytest.mark.parametrize(
        ("mode", "asynchronous", "expected"),
        [
            ("delayed_compute", True, "compute"),
            ("delayed_compute", False, "compute"),
            ("delayed_communication", True, "communication"),
            ("delayed_communication", False, None),
        ],
    )
    def test_one_side_is_late(self, mode, asynchronous, expected):
        """Only what runs beside the computation can be late for it."""
        assert expected == late(mode, asynchronous)

    @pytest.mark.parametrize("mode", MODES)
    def test_the_cpu_refuses_delays_and_says_what_to_ask_for(self, mode):
        """It has no streams; poison does the same there."""
        with pytest.raises(EngineError, match=f"'{mode}' delays streams of a GPU; on the CPU ask for 'poisoned'"):
            require_gpu(mode, "cpu")

    @pytest.mark.parametrize("asynchrony", ["plain", "poisoned", "watched"])
    def test_other_modes_are_not_its_business(self, asynchrony):
        """They are refused or allowed elsewhere."""
        require_gpu(asynchrony, "cpu")

    @pytest.mark.parametrize("mode", MODES)
    def test_gpus_allow_delays(self, mode):
        """Whatever their number."""
        require_gpu(mode, "cuda")
