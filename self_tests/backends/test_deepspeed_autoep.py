"""AutoEP's layer in the adapter to DeepSpeed, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_conformance.backends.deepspeed import DeepSpeed
from moe_conformance.chapters.training.workloads import script
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.workloads import layers, recipes
from moe_conformance.workloads.records.workload import Workload
from self_tests.backends.asking import finished, prepared, refusals
from self_tests.backends.dense import assert_equal_to_the_bit, assert_layer_alike, oracle, seen, worst
from self_tests.backends.trained import assert_trained_alike, trained

pytest.importorskip("deepspeed")

NAME = "moe_conformance.backends.deepspeed:DeepSpeed"
SINGLE, EP2, EP2_EDP2, TP2_EP2 = Layout(1), Layout(2, ep=2), Layout(4, ep=2), Layout(4, ep=2, tp=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported DeepSpeed already."""
    with prepared(DeepSpeed) as engine:
        yield engine


def pinned(layout: Layout, name: str) -> Workload:
    """The pinned workload of that name."""
    return next(w for w in recipes.corpus("autoep", layout, "full") if w.name == name)


class TestExchange:
    @pytest.mark.parametrize("layout", [SINGLE, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        "name",
        ["uneven", "rank-without-tokens", "one-expert-even", "duplicates-even", "in-flight-uneven", "uneven-bfloat16"],
    )
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        assert_equal_to_the_bit(finished(engine, NAME, pinned(layout, name)))

    def test_weights_may_go_before_the_experts(self, engine: Engine) -> None:
        """With weights on the input, the layer's option "pre", it is built so and computes the same step."""
        workload = next(
            w for w in recipes.corpus("autoep", EP2, "full") if w.config.weights_applied == "input" and w.batches
        )
        outcome = finished(engine, NAME, workload)
        assert "pre" == outcome.ranks[0].resolved["weights"]
        assert_equal_to_the_bit(outcome)


class TestExperts:
    @pytest.mark.parametrize("layout", [SINGLE, EP2], ids=lambda layout: layout.name)
    def test_they_are_swiglu(self, engine: Engine, layout: Layout) -> None:
        """Outputs and gradients of tokens and weights."""
        workload = pinned(layout, "own-uneven" if layout == EP2 else "own-even")
        outcome = finished(engine, NAME, workload)
        assert "GroupedExperts" == outcome.ranks[0].resolved["experts"]
        expected, (y, dx, dweights) = oracle(workload), seen(outcome)
        assert worst(y, expected.y_TD) < 1e-5
        assert worst(dx, expected.dx_TD) < 1e-5
        assert worst(dweights, expected.dweights_TK) < 1e-5


class TestLayer:
    @pytest.mark.parametrize("layout", [SINGLE, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("name", ["layer-even", "shared-even", "shared-scaled-even", "shared-gate-even"])
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Outputs and gradients of router, routed and shared experts, these over the data parallel ranks."""
        workload = next(w for w in layers.layers("autoep", layout, "full") if w.name == name)
        assert_layer_alike(finished(engine, NAME, workload), divisor=layout.dp, allowed=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "surface", "fields", "reason"),
        [
            (EP2, "exchange", {"experts": 5}, "5 on ep = 2"),
            (TP2_EP2, "exchange", {"token_copies": True}, "token_copies=True"),
            (TP2_EP2, "exchange", {}, "folds ep over the tp ranks"),
            (EP2, "experts", {"activation.function": "relu"}, "AutoEP's experts have SwiGLU"),
            (EP2, "experts", {"dtype": torch.float64}, "gradients of float32 and bfloat16"),
            (EP2, "layer", {"routing.score": "sqrtsoftplus"}, "softmax or sigmoid, not sqrtsoftplus"),
            (EP2, "layer", {"routing.groups": (4, 2), "routing.group_score": "topk_sum"}, "not by topk_sum"),
            (EP2, "layer", {"router_dtype": torch.float64}, "logits of the dtype of its tokens"),
            (EP2, "layer", {"routing.forced": (("random", None),)}, "forces routes"),
            (EP2, "masked_router", {}, "no mask of used tokens"),
            (EP2, "training_routers", {"losses.auxiliary": 0.5}, "AutoEP has no loss"),
        ],
    )
    def test_what_it_cannot_ask_for_is_refused(
        self, engine: Engine, layout: Layout, surface: str, fields: Mapping[str, Any], reason: str
    ) -> None:
        """Every rank refuses, the adapter in its own name."""
        for who, why in refusals(engine, NAME, "autoep", layout, surface, fields):
            assert "adapter" == who
            assert reason in why


class TestTrainer:
    def test_it_trains_in_float32(self, engine: Engine) -> None:
        """Four microbatches of one rank, clipped or not, are a step of ZeRO 0, which reports no norm."""
        outcome = trained(engine, NAME, "autoep", SINGLE, "train-adamw")
        assert_trained_alike(outcome, allowed=1e-3)
        resolved = outcome.ranks[0].resolved
        assert ("AdamW of AdamW", "0", "dense-params, ep_size_1") == tuple(
            resolved[name] for name in ("optimizer", "ZeRO", "groups")
        )

    @pytest.mark.parametrize(("stage", "sharding"), [("1", "own"), ("2", "gradients")])
    def test_it_trains_in_bfloat16(self, engine: Engine, stage: str, sharding: str) -> None:
        """ZeRO shares states among the replicas of a parameter, and its norm is that of the whole model."""
        workload = script("train-clipped-bfloat16", EP2_EDP2).through("autoep")
        workload = replace(workload, config=workload.config.changed({"sharding": sharding}))
        outcome = finished(engine, NAME, workload)
        assert_trained_alike(outcome, allowed=0.03)
        resolved = outcome.ranks[0].resolved
        assert ("DeepSpeedZeroOptimizer of AdamW", stage) == (resolved["optimizer"], resolved["ZeRO"])
