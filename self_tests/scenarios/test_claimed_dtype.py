"""A layer whose router computes in float32 on tokens of float64: right where it says so, told of the claim if not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.contract import Claims
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.layer.layer import judge_layer_dx, judge_layer_outputs
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.workloads.layers import layers
from self_tests.correct_backends.unusual import WeighsInFloat32

CLAIMED = "self_tests.correct_backends.unusual:InFloat32"


class _Unsaid(WeighsInFloat32):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, dtype=None)


class Unsaid(Native):
    """One that does not say so."""

    session_class = NativeSession.building(_Unsaid)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for all tests here."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


class TestDtype:
    @pytest.mark.parametrize("judge", [judge_layer_outputs, judge_layer_dx])
    def test_a_claimed_dtype_is_followed(self, engine: Engine, judge: object) -> None:
        """Outputs and gradients within the errors of float32 pass with the claim, and its message names it without."""
        every = layers("alltoall", Layout(1), "full")
        workload = next(each for each in every if each.name == "shared-even-float64")
        tally = Tally()
        judge(read(moe_step(engine, CLAIMED, workload)), tally)  # type: ignore[operator]
        assert not tally.vacuous
        with pytest.raises(Mismatch, match=r"computes in float32 by design claims dtype = torch\.float32"):
            judge(read(moe_step(engine, f"{__name__}:Unsaid", workload)), Tally())  # type: ignore[operator]
        with pytest.raises(Mismatch, match="precision of float32 instead of float64"):
            judge(read(moe_step(engine, f"{__name__}:Unsaid", workload)), Tally())  # type: ignore[operator]
