"""Delays of CUDA streams: the decisions that can be tested without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from moe_conformance.engine import Engine, EngineError, Job
from moe_conformance.engine.gpu.delays import MODES, check, late


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
    def test_one_side_is_late(self, mode: Any, asynchronous: bool, expected: str | None) -> None:
        """Mode "delayed_compute" delays the computation, "delayed_communication" only asynchronous collectives."""
        assert expected == late(mode, asynchronous)

    @pytest.mark.parametrize("mode", MODES)
    def test_the_cpu_refuses_delays_and_says_what_to_ask_for(self, mode: str) -> None:
        """The CPU has no streams; the message names "poisoned" instead."""
        with pytest.raises(EngineError, match=f"'{mode}' delays streams of a GPU; on the CPU use 'poisoned'"):
            check(mode, "cpu")

    def test_a_gpu_refuses_poison_and_says_what_to_ask_for(self) -> None:
        """Buffers are not hidden on a GPU; the message names the delays instead."""
        with pytest.raises(EngineError, match="'poisoned' hides buffers of the CPU; on a GPU use delayed_compute or"):
            check("poisoned", "cuda")

    @pytest.mark.parametrize(
        ("asynchrony", "device"),
        [("plain", "cpu"), ("plain", "cuda"), ("watched", "cpu"), ("watched", "cuda"), ("poisoned", "cpu")],
    )
    def test_other_modes_are_allowed(self, asynchrony: str, device: str) -> None:
        """Modes "plain" and "watched" are allowed on every device."""
        check(asynchrony, device)

    @pytest.mark.parametrize("mode", MODES)
    def test_gpus_allow_delays(self, mode: str) -> None:
        """All delays are allowed on a GPU."""
        check(mode, "cuda")

    def test_an_engine_refuses_a_job_that_its_device_cannot_run(self) -> None:
        """The job is refused before any rank starts."""
        job = Job("self_tests.engine.engine_jobs:echo", None, 2, {}, asynchrony="delayed_compute")
        with Engine() as engine, pytest.raises(EngineError, match="on the CPU use 'poisoned'"):
            engine.run(job)
