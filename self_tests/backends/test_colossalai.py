"""The adapter to Colossal-AI, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from moe_conformance.backends.colossalai import ColossalAI
from moe_conformance.chapters.losses import workloads as losses
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads import layers, recipes, routers
from moe_conformance.workloads.records.workload import Workload
from self_tests.backends.asking import finished, refusals
from self_tests.backends.dense import assert_layer_alike, assert_routed_alike, oracle, seen, worst

if find_spec("colossalai") is None:
    pytest.skip("Colossal-AI is not here", allow_module_level=True)
NAME = "moe_conformance.backends.colossalai:ColossalAI"
SINGLE, EP2, EP4, EP2_EDP2 = Layout(1), Layout(2, ep=2), Layout(4, ep=4), Layout(4, ep=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported the library already."""
    with Engine(preload=(*ColossalAI.preload, "moe_conformance.scenarios.moe_step")) as engine:
        yield engine


def run(engine: Engine, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish."""
    return finished(engine, NAME, workload)


def test_importing_the_adapter_does_not_import_the_library() -> None:
    """A driver that only lists backends stays light."""
    code = "import sys, moe_conformance.backends.colossalai; sys.exit('colossalai' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode


def test_what_the_library_is_imported_without_is_not_left_behind() -> None:
    """Packages that it would import, and that blocks do not call, are as absent afterwards as before."""
    code = (
        "import sys, moe_conformance.backends.colossalai.library\n"
        "sys.exit(any(name.split('.')[0] in ('peft', 'galore_torch', 'bitsandbytes') for name in sys.modules))"
    )
    assert 0 == subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, timeout=120).returncode


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, EP4, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("variant", ["deepseek", "deepseek-v3"])
    @pytest.mark.parametrize("name", ["uneven", "in-flight-even"])
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, variant: str, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        workload = next(w for w in recipes.corpus(variant, layout, "full") if w.name == name)
        outcome = run(engine, workload)
        expected, (y, dx, dweights) = oracle(workload), seen(outcome)
        assert torch.equal(expected.y_TD, y)
        assert torch.equal(expected.dx_TD, dx)
        assert torch.equal(expected.dweights_TK, dweights)

    def test_it_says_what_it_left_out(self, engine: Engine) -> None:
        """The class of the block, the size of its group, and the functions that take no part."""
        workload = next(w for w in recipes.corpus("deepseek", EP4, "full") if w.name == "even")
        resolved = run(engine, workload).ranks[0].resolved
        assert ("EPDeepseekMoE", "4") == (resolved["block"], resolved["ep ranks"])
        assert "gradient scalers around experts" == resolved["left out"]


class TestLayer:
    @pytest.mark.parametrize(
        ("layout", "variant", "name"),
        [
            (SINGLE, "mixtral", "layer-even"),
            (EP2_EDP2, "mixtral", "layer-even"),
            (SINGLE, "deepseek", "shared-even"),
            (EP2, "deepseek", "shared-even"),
        ],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, variant: str, name: str) -> None:
        """Outputs, and gradients of all parts, averaged over data parallel ranks: all replicas have tokens (CO-01)."""
        workload = next(w for w in layers.layers(variant, layout, "full") if w.name == name)
        asked = workload.config.changed({"routing.normalise": True})
        assert_layer_alike(run(engine, replace(workload, config=asked)), divisor=layout.dp, allowed=1e-5)


class TestGate:
    @pytest.mark.parametrize("name", ["route-softmax", "route-softmax-normalised"])
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, name: str) -> None:
        """The same experts and the same weights."""
        workload = next(w for w in routers.routing_corpus("deepseek", EP2) if w.name == name)
        assert_routed_alike(run(engine, workload), 1e-6)

    def test_its_loss_of_sequences_is_returned(self, engine: Engine) -> None:
        """The gradient of a gate with a coefficient is not that without."""
        workload = next(w for w in losses.scripts("deepseek", EP2, "full") if w.name == "losses-sequence")
        without = replace(workload, config=workload.config.changed({"losses.sequence": 0.0}))
        for rank, plain in zip(run(engine, workload).ranks, run(engine, without).ranks, strict=True):
            found, other = (each.answers[0].values["final"] for each in (rank, plain))
            assert len(found) == len(other) == workload.config.losses.layers
            assert all(worst(ours, theirs) > 1e-3 for ours, theirs in zip(found, other, strict=True))


@pytest.mark.parametrize(
    ("layout", "surface", "fields", "reason"),
    [
        (EP2, "exchange", {"experts": 5}, "5 on ep = 2"),
        (EP2, "exchange", {"variant": "mixtral"}, "computes its routing itself"),
        (EP2, "exchange", {"dtype": torch.bfloat16}, "where weights are float32"),
        (Layout(2, etp=2), "exchange", {}, "etp = 2"),
        (EP2, "router", {"variant": "deepseek-v3"}, "a model's"),
        (EP2, "router", {"routing.score": "sigmoid"}, "the softmax of all logits"),
        (EP2, "layer", {"variant": "deepseek-v3"}, "a model's"),
        (EP2, "layer", {"variant": "mixtral"}, "always normalises"),
        (EP2, "layer", {"top_k": 1, "routing.normalise": True}, "does not normalise"),
        (Layout(2, tp=2), "layer", {}, "tensor ranks with the same tokens"),
        (EP2, "training_routers", {"losses.auxiliary": 0.5, "losses.sequence": 0.5}, "one loss"),
    ],
)
def test_what_it_cannot_ask_for_is_refused(
    engine: Engine, layout: Layout, surface: str, fields: dict[str, Any], reason: str
) -> None:
    """Every rank refuses, in the name of the adapter."""
    for who, why in refusals(engine, NAME, "deepseek", layout, surface, fields):
        assert "adapter" == who
        assert reason in why
