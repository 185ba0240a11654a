"""Megatron-Core's combined 1F1B schedule as the adapter drives it, and what is seen of changes to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_conformance.backends.megatron_core import MegatronCore
from moe_conformance.chapters.overlap.workloads import steps
from moe_conformance.contract import Session, Topology, Unsupported
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Grad, Outcome
from moe_conformance.scenarios.overlapped import OverlapSeen
from moe_conformance.workloads.records.workload import Workload

try:
    MegatronCore().versions()  # importing the library here would take seconds: only the ranks need it
except Unsupported as missing:
    pytest.skip(str(missing), allow_module_level=True)

EP2 = Layout(2, ep=2)


class WithoutWaits(MegatronCore):
    """A schedule that waits for no event, and gives no memory back, which would end the process."""

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Take the waits out on this rank."""
        from moe_conformance.backends.megatron_core import library
        from moe_conformance.stand_ins import streams

        assert library.SHIMS
        streams.Event.wait = lambda self, stream=None: None  # type: ignore[method-assign]
        for module in list(sys.modules.values()):
            if hasattr(module, "should_free_input"):
                setattr(module, "should_free_input", lambda *_: False)  # noqa: B010 - which module differs
        return super().open(topology, device)


class WithoutSharedExperts(MegatronCore):
    """A layer that leaves the delayed weight gradients of shared experts where they are."""

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Leave them out on this rank."""
        from moe_conformance.backends.megatron_core import library

        own = library.MoELayer.backward_dw

        def backward_dw(self: Any, routed_experts: bool = True, shared_experts: bool = False) -> None:
            own(self, routed_experts, False)

        library.MoELayer.backward_dw = backward_dw
        return super().open(topology, device)


PRELOAD = (*MegatronCore.preload, "moe_conformance.scenarios.moe_step")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported Megatron-Core already."""
    with Engine(preload=PRELOAD, environment=MegatronCore.environment) as engine:
        yield engine


@pytest.fixture
def changed() -> Iterator[Engine]:
    """Ranks for one test, which changes the library."""
    with Engine(preload=PRELOAD, environment=MegatronCore.environment) as engine:
        yield engine


def outcome_of(engine: Engine, backend: type[MegatronCore], name: str) -> Outcome:
    """Run the steps of that name on two ranks."""
    workload: Workload = next(w for w in steps("alltoall", EP2, "full") if w.name == name)
    return moe_step(engine, f"{backend.__module__}:{backend.__qualname__}", workload)


def seen(outcome: Outcome) -> list[OverlapSeen]:
    """What every rank recorded."""
    assert ["ok"] * 2 == [rank.status for rank in outcome.ranks], [rank.error for rank in outcome.ranks]
    found = [rank.seen for rank in outcome.ranks]
    return [each for each in found if isinstance(each, OverlapSeen)]


def differing(right: dict[Any, Grad], other: dict[Any, Grad]) -> set[str]:
    """The kinds of parameters whose gradients have other bits."""
    return {
        name.partition("/")[2]
        for (name, expert), grad in right.items()
        if not torch.equal(grad.value, other[name, expert].value)
    }


class TestSchedule:
    def test_deferred_gradients_are_those_computed_at_once(self, engine: Engine) -> None:
        """Two microbatches leave the same bits, in outputs, input gradients and parameters."""
        outcome = outcome_of(engine, MegatronCore, "overlap-deferred-uneven-bfloat16")
        for rank in seen(outcome):
            first = rank.overlapped[0]
            assert all(map(torch.equal, rank.sequential.y, first.y))
            assert set() == differing(dict(rank.sequential.local), dict(first.local))
        resolved = outcome.ranks[0].resolved
        assert "combined_1f1b_schedule_for_no_pipelining" == resolved["schedule"]
        assert "TEGroupedMLP" == resolved["experts"]
        assert "delayed weight gradients of Transformer Engine's linear layers" in resolved["stand-ins"]

    def test_all_to_alls_are_in_flight_during_products(self, engine: Engine) -> None:
        """Without deferred weights too: on every rank at least one for each of the two layers."""
        for rank in seen(outcome_of(engine, MegatronCore, "overlap-watched-uneven-bfloat16")):
            assert 2 <= len(rank.products)

    def test_an_event_that_is_not_waited_for_shows(self, changed: Engine) -> None:
        """Tokens are used before they have arrived, while they are NaN."""
        for rank in seen(outcome_of(changed, WithoutWaits, "overlap-delayed-uneven-bfloat16")):
            assert any(bool(y.isnan().any()) for y in rank.overlapped[0].y)

    def test_a_product_that_is_left_out_shows(self, changed: Engine) -> None:
        """The gradients of shared experts are missing, and no others."""
        for rank in seen(outcome_of(changed, WithoutSharedExperts, "overlap-deferred-even-bfloat16")):
            shared = {"shared_gate", "shared_up", "shared_down"}
            assert shared == differing(dict(rank.sequential.local), dict(rank.overlapped[0].local))

    def test_float32_is_the_librarys_to_refuse(self, engine: Engine) -> None:
        """Its config overlaps models in half precision alone."""
        outcome = outcome_of(engine, MegatronCore, "overlap-uneven")
        assert ["refused"] * 2 == [rank.status for rank in outcome.ranks]
