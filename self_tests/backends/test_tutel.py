"""The adapter to Tutel, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from moe_conformance.backends.tutel import Tutel
from moe_conformance.chapters.losses import workloads as losses
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads import layers, recipes, routers
from moe_conformance.workloads.records.workload import Workload
from self_tests.backends.asking import finished, refusals
from self_tests.backends.dense import (
    assert_equal_to_the_bit,
    assert_layer_alike,
    assert_routed_alike,
    worst,
)

if find_spec("tutel_custom_kernel") is None:
    pytest.skip("Tutel and its extension are not here", allow_module_level=True)
NAME = "moe_conformance.backends.tutel:Tutel"
SINGLE, EP2, EP4, EP2_EDP2 = Layout(1), Layout(2, ep=2), Layout(4, ep=4), Layout(4, ep=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported the library already."""
    with Engine(preload=(*Tutel.preload, "moe_conformance.scenarios.moe_step")) as engine:
        yield engine


def run(engine: Engine, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish."""
    return finished(engine, NAME, workload)


def pinned(layout: Layout, name: str) -> Workload:
    """The pinned workload of that name."""
    return next(w for w in recipes.corpus("alltoall", layout, "full") if w.name == name)


def test_importing_the_adapter_does_not_import_the_library() -> None:
    """A driver that only lists backends stays light."""
    code = "import sys, moe_conformance.backends.tutel; sys.exit('tutel' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, EP4, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("name", ["uneven", "in-flight-even", "input-weights-even"])
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        outcome = run(engine, pinned(layout, name))
        assert_equal_to_the_bit(outcome)

    def test_it_says_what_it_repaired(self, engine: Engine) -> None:
        """A group that is the world needs no repair, and a part of it does."""
        resolved = [run(engine, pinned(layout, "even")).ranks[0].resolved for layout in (EP2, EP2_EDP2)]
        assert [None, "TU-01"] == [each.get("repaired") for each in resolved]
        assert {"2"} == {each["ep ranks"] for each in resolved}


class TestLayer:
    @pytest.mark.parametrize("layout", [SINGLE, EP2, EP4], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("normalise", [False, True])
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, normalise: bool) -> None:
        """Outputs, and gradients of gate and experts, added up over the data parallel ranks."""
        workload = next(w for w in layers.layers("alltoall", layout, "full") if w.name == "layer-even")
        asked = workload.config.changed({"routing.normalise": normalise})
        assert_layer_alike(run(engine, replace(workload, config=asked)), divisor=1, allowed=1e-5)


class TestGate:
    @pytest.mark.parametrize("name", ["route-softmax", "route-softmax-normalised"])
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, name: str) -> None:
        """The same experts, the same weights, and the true load."""
        workload = next(w for w in routers.routing_corpus("alltoall", EP2) if w.name == name)
        outcome = run(engine, workload)
        assert_routed_alike(outcome, 1e-6)
        for rank in outcome.ranks:
            found = rank.microbatches[0].router
            assert found.ids_TK is not None
            load_E = torch.bincount(found.ids_TK.flatten(), minlength=workload.config.experts)
            assert torch.equal(load_E, found.counts_E.long())

    def test_its_loss_is_returned(self, engine: Engine) -> None:
        """The gradient of a gate with a coefficient is not that without."""
        workload = next(w for w in losses.scripts("alltoall", EP2, "full") if w.name == "losses-first-choice")
        without = replace(workload, config=workload.config.changed({"losses.first_choice": 0.0}))
        for rank, plain in zip(run(engine, workload).ranks, run(engine, without).ranks, strict=True):
            found, other = (each.answers[0].values["final"] for each in (rank, plain))
            assert len(found) == len(other) == workload.config.losses.layers
            assert all(worst(ours, theirs) > 1e-3 for ours, theirs in zip(found, other, strict=True))


@pytest.mark.parametrize(
    ("layout", "surface", "fields", "by", "reason"),
    [
        (EP2, "exchange", {"experts": 5}, "adapter", "5 on ep = 2"),
        (Layout(2, etp=2), "exchange", {}, "adapter", "etp = 2"),
        (EP2_EDP2, "experts", {}, "adapter", "edp = 2"),
        (EP2, "layer", {"hidden": 33}, "library", "must be even value"),
        (EP2, "layer", {"top_k": 1, "routing.normalise": True}, "adapter", "does not normalise"),
        (EP2, "router", {"routing.score": "sigmoid"}, "adapter", "the softmax of all logits"),
        (EP2, "router", {"capacity.factor": 1.0}, "adapter", "by the position"),
        (Layout(2, tp=2), "training_routers", {}, "adapter", "no tensor ranks"),
    ],
)
def test_what_it_cannot_ask_for_is_refused(
    engine: Engine, layout: Layout, surface: str, fields: dict[str, Any], by: str, reason: str
) -> None:
    """Every rank refuses, in the name of the adapter or of the library."""
    for who, why in refusals(engine, NAME, "alltoall", layout, surface, fields):
        assert by == who
        assert reason in why
