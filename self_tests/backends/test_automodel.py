"""The adapter to NeMo Automodel, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_conformance.backends.automodel import Automodel
from moe_conformance.chapters.losses import workloads as losses
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads import recipes, routers
from moe_conformance.workloads.records.workload import ParameterKey, Workload
from self_tests.backends.asking import finished, prepared, refusals
from self_tests.backends.dense import assert_layer_alike, assert_routed_alike, oracle, seen, worst

pytest.importorskip("nemo_automodel")

NAME = "moe_conformance.backends.automodel:Automodel"
CPU = torch.device("cpu")
SINGLE, EP2, EP4, EP2_EDP2 = Layout(1), Layout(2, ep=2), Layout(4, ep=4), Layout(4, ep=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported the library already."""
    with prepared(Automodel) as engine:
        yield engine


def run(engine: Engine, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish."""
    return finished(engine, NAME, workload)


def pinned(variant: str, layout: Layout, name: str) -> Workload:
    """The pinned workload of that name."""
    return next(w for w in recipes.corpus(variant, layout, "full") if w.name == name)


class TestModule:
    def test_importing_the_adapter_does_not_import_the_library(self) -> None:
        """A driver that only lists backends stays light."""
        code = "import sys, moe_conformance.backends.automodel; sys.exit('nemo_automodel' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode

    def test_versions_name_the_library(self) -> None:
        """Verdicts can be told apart by the version that they are about."""
        assert {"nemo-automodel", "torch"} == set(Automodel().versions())


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, EP4, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("name", ["uneven", "rank-without-tokens", "duplicates-even", "dropped-even"])
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation."""
        outcome = run(engine, pinned("loop", layout, name))
        expected, (y, dx, dweights) = oracle(outcome.workload), seen(outcome)
        assert worst(y, expected.y_TD) < 1e-6
        assert worst(dx, expected.dx_TD) < 1e-6
        assert worst(dweights, expected.dweights_TK) < 1e-6

    def test_it_says_what_it_built(self, engine: Engine) -> None:
        """The class, the size of its group, and what every rank receives."""
        rank = run(engine, pinned("loop", EP4, "uneven")).ranks[0]
        assert ("GroupedExperts", "4") == (rank.resolved["experts"], rank.resolved["ep ranks"])
        assert ("all", "routed", "expert") == (rank.claims.wire, rank.claims.handed, rank.claims.weights_at)


class TestExperts:
    @pytest.mark.parametrize("variant", Automodel.variants)
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2, Layout(2)], ids=lambda layout: layout.name)
    def test_gradients_are_averaged_over_ranks(self, engine: Engine, layout: Layout, variant: str) -> None:
        """After finishing, every expert is held once, in parts or whole, with the gradient of all tokens over ranks."""
        outcome = run(engine, pinned(variant, layout, "own-in-flight-uneven"))
        expected = oracle(outcome.workload)
        assert worst(seen(outcome)[0], expected.y_TD) < 1e-6
        largest = max(float(value.abs().max()) for value in expected.parameters.values())
        held: dict[ParameterKey, float] = dict.fromkeys(expected.parameters, 0.0)
        for rank in outcome.ranks:
            assert () == rank.uncovered
            for key, grad in (rank.grads_final or {}).items():
                assert grad.value is not None
                wanted = shard_of(expected.parameters[key], grad.shard) / layout.world
                assert float((grad.value.double() - wanted).abs().max()) / largest < 1e-6
                held[key] += 1.0 if grad.shard is None else 1.0 / grad.shard[2]
        assert {1.0} == set(held.values())


class TestRouter:
    @pytest.mark.parametrize(
        ("name", "built"),
        [
            ("route-softmax-normalised", "softmax"),
            ("route-sigmoid-biased-normalised-scaled", "sigmoid"),
            ("route-groups-top2-softmax", "softmax_with_bias"),
        ],
    )
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, name: str, built: str) -> None:
        """The same experts, the same weights, and the true load."""
        workload = next(w for w in routers.routing_corpus("loop", Layout(2)) if w.name == name)
        outcome = run(engine, workload)
        assert_routed_alike(outcome, 1e-6)
        for rank in outcome.ranks:
            assert built == rank.resolved["score_func"]
            found = rank.microbatches[0].router
            assert found.counts_E is not None
            assert found.ids_TK is not None
            load_E = torch.bincount(found.ids_TK.flatten(), minlength=workload.config.experts)
            assert torch.equal(load_E, found.counts_E.long())


class TestLayer:
    @pytest.mark.parametrize("variant", Automodel.variants)
    @pytest.mark.parametrize("layout", [SINGLE, EP2, EP2_EDP2, Layout(2)], ids=lambda layout: layout.name)
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, variant: str) -> None:
        """Outputs and gradients of gate, experts and shared experts, over the data parallel ranks."""
        workload = next(w for w in shared_experts.layers(variant, layout, "full") if w.name == "layer-even")
        asked = {"routing.normalise": True}
        outcome = run(engine, replace(workload, config=workload.config.changed(asked)))
        assert_layer_alike(outcome, divisor=layout.dp, allowed=1e-5)


class TestLosses:
    def test_the_loss_is_attached_to_the_weights(self, engine: Engine) -> None:
        """The gradient of a gate with a coefficient is not that without."""
        workload = next(w for w in losses.scripts("loop", EP2, "full") if w.name == "losses-auxiliary")
        outcome = run(engine, workload)
        without = replace(workload, config=workload.config.changed({"losses.auxiliary": 0.0}))
        for rank, plain in zip(outcome.ranks, run(engine, without).ranks, strict=True):
            assert ["auxiliary"] == list(rank.answers[0].values["report"])
            found, other = (each.answers[0].values["final"] for each in (rank, plain))
            assert len(found) == len(other) == workload.config.losses.layers
            assert not any(map(torch.equal, found, other))


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "surface", "fields", "reason"),
        [
            (EP2, "exchange", {"experts": 5}, "5 on ep = 2"),
            (EP2, "exchange", {"weights_applied": "input"}, "between the projections"),
            (EP2, "exchange", {"variant": "deepep"}, "is not one of loop, grouped"),
            (EP2, "experts", {"dtype": torch.float64}, "in float32: not float64"),
            (EP2, "experts", {"expert_biases": "output"}, "not behind down alone"),
            (EP2, "experts", {"variant": "grouped", "ffn": 12}, "rows of 16 bytes"),
            (EP2_EDP2, "experts", {"ffn": 15}, "dimension 1 in equal parts"),
            (EP2_EDP2, "experts", {"expert_biases": "all"}, "in parts of both"),
            (Layout(2, etp=2), "exchange", {}, "etp = 2"),
            (Layout(2, tp=2, ep=2), "layer", {}, "tp = 2 takes the plan"),
            (EP2, "layer", {"shared.gate": True}, "there are none"),
            (EP2, "layer", {"top_k": 1, "routing.normalise": True}, "does not normalise"),
            (EP2, "router", {"routing.groups": (4, 2), "routing.score": "sqrtsoftplus"}, "no gate has"),
            (EP2, "training_routers", {"losses.z": 0.5}, "no loss z"),
            (EP2, "balancing_routers", {"routing.balance_bias": True, "balance.rule": "quantile"}, "by the sign"),
        ],
    )
    def test_what_it_cannot_ask_for_is_refused(
        self, engine: Engine, layout: Layout, surface: str, fields: dict[str, Any], reason: str
    ) -> None:
        """Every rank refuses, in the name of the adapter."""
        for who, why in refusals(engine, NAME, "loop", layout, surface, fields):
            assert "adapter" == who
            assert reason in why
