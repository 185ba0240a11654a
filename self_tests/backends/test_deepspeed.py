"""The adapter to DeepSpeed, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_conformance.backends.deepspeed import DeepSpeed
from moe_conformance.chapters.losses import workloads as losses
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.reference.capacity import drops
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads import recipes, routers
from moe_conformance.workloads.records.workload import ParameterKey, Workload
from self_tests.backends.asking import finished, prepared, refusals
from self_tests.backends.dense import (
    assert_equal_to_the_bit,
    assert_layer_alike,
    assert_routed_alike,
    oracle,
    seen,
    worst,
)

pytest.importorskip("deepspeed")

NAME = "moe_conformance.backends.deepspeed:DeepSpeed"
CPU = torch.device("cpu")
SINGLE, EP2, EP4 = Layout(1), Layout(2, ep=2), Layout(4, ep=4)
EP2_EDP2, TP2_EP2, TP2_EP4 = Layout(4, ep=2), Layout(4, ep=2, tp=2), Layout(4, ep=4, tp=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported DeepSpeed already."""
    with prepared(DeepSpeed) as engine:
        yield engine


def pinned(layout: Layout, name: str) -> Workload:
    """The pinned workload of that name."""
    return next(w for w in recipes.corpus("moe", layout, "full") if w.name == name)


def run(engine: Engine, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish."""
    return finished(engine, NAME, workload)


def closed(context: RankContext, layout: Layout) -> bool:
    """On a rank: open and close a session, and return whether the library's groups and LOCAL_RANK are gone."""
    from deepspeed.utils import groups

    before = os.environ.get("LOCAL_RANK")
    session = DeepSpeed().open(Topology(layout, context.rank, context.groups), CPU)
    made = len(groups._get_expert_parallel_group_dict())
    session.close()
    left = groups._get_expert_parallel_group_dict() or groups.mpu or os.environ.get("LOCAL_RANK") != before
    return made == 1 and not left


class TestModule:
    def test_importing_the_adapter_does_not_import_the_library(self) -> None:
        """A driver that only lists backends stays light."""
        code = "import sys, moe_conformance.backends.deepspeed; sys.exit('deepspeed' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode

    def test_versions_name_the_library(self) -> None:
        """Verdicts can be told apart by the version that they are about."""
        assert {"deepspeed", "torch"} == set(DeepSpeed().versions())

    def test_close_leaves_no_group(self, engine: Engine) -> None:
        """The next session finds the library as this one has found it."""
        result = engine.run(Job(f"{__name__}:closed", EP2_EDP2, 4, EP2_EDP2.groups(), deadline_s=30.0))
        assert [("ok", True)] * 4 == [(rank.status, rank.value) for rank in result.ranks]


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        "name",
        [
            "uneven",
            "rank-without-tokens",
            "one-expert-even",
            "idle-rank-even",
            "top-all-even",
            "odd-experts-even",
            "duplicates-even",
            "dropped-even",
            "two-dims-even",
            "in-flight-uneven",
            "uneven-bfloat16",
        ],
    )
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        outcome = run(engine, pinned(layout, name))
        assert_equal_to_the_bit(outcome)

    @pytest.mark.parametrize("layout", [TP2_EP2, TP2_EP4], ids=lambda layout: layout.name)
    def test_tensor_ranks_share_the_places(self, engine: Engine, layout: Layout) -> None:
        """Each of two tensor ranks that hold the same tokens sends half of the places, and has the whole output."""
        workload = pinned(layout, "even")
        (batches,) = workload.batches
        copies = (tuple(batches[rank - rank % 2] for rank in range(4)),)
        workload = replace(workload, batches=copies, config=workload.config.changed({"token_copies": True}))
        outcome = run(engine, workload)
        once = replace(workload, batches=((batches[0], batches[2]),), layout=Layout(2))
        expected, (y, dx, _) = oracle(once), seen(replace(outcome, ranks=outcome.ranks[::2]))
        assert torch.equal(expected.y_TD, y)
        assert torch.equal(expected.dx_TD, dx)

    def test_it_says_what_it_built(self, engine: Engine) -> None:
        """The layer, the size of its group, and what every rank receives."""
        rank = run(engine, pinned(EP4, "uneven")).ranks[0]
        assert ("MOELayer", "4") == (rank.resolved["layer"], rank.resolved["ep ranks"])
        assert ("capacity", "static") == (rank.claims.wire, rank.claims.handed)


class TestExperts:
    @pytest.mark.parametrize("name", ["own-rank-without-tokens", "own-in-flight-uneven", "own-odd-experts-even"])
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2, Layout(2)], ids=lambda layout: layout.name)
    def test_gradients_are_averaged_over_ranks(self, engine: Engine, layout: Layout, name: str) -> None:
        """After finishing, every expert is held once per replica, with the gradient of all tokens over the ranks."""
        outcome = run(engine, pinned(layout, name))
        expected = oracle(outcome.workload)
        assert worst(seen(outcome)[0], expected.y_TD) < 1e-6
        largest = max(float(value.abs().max()) for value in expected.parameters.values())
        held: dict[ParameterKey, int] = dict.fromkeys(expected.parameters, 0)
        for rank in outcome.ranks:
            assert () == rank.uncovered
            for key, grad in (rank.grads_final or {}).items():
                assert grad.value is not None
                wanted = shard_of(expected.parameters[key], grad.shard) / layout.world
                assert float((grad.value.double() - wanted).abs().max()) / largest < 1e-6
                held[key] += 1
        assert {layout.edp} == set(held.values())


class TestRouter:
    @pytest.mark.parametrize(
        ("variant", "name", "built"),
        [
            ("moe", "route-softmax-normalised", "TopKGate"),
            ("moe", "route-softmax", "TokenChoiceTopKRouter"),
            ("autoep", "route-softmax", "TokenChoiceTopKRouter"),
            ("autoep", "route-sigmoid-biased-normalised-scaled", "TokenChoiceTopKRouter"),
            ("autoep", "route-groups-top2", "TokenChoiceTopKRouter"),
            ("autoep", "route-groups-max", "TokenChoiceTopKRouter"),
        ],
    )
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, variant: str, name: str, built: str) -> None:
        """The same experts, the same weights, and the true load."""
        workload = next(w for w in routers.routing_corpus(variant, Layout(2)) if w.name == name)
        outcome = run(engine, workload)
        assert_routed_alike(outcome, 1e-6)
        for rank in outcome.ranks:
            assert built == rank.resolved["router"]
            found = rank.microbatches[0].router
            assert found.counts_E is not None
            assert found.ids_TK is not None
            load_E = torch.bincount(found.ids_TK.flatten(), minlength=workload.config.experts)
            assert torch.equal(load_E, found.counts_E.long())

    @pytest.mark.parametrize(("K", "policy"), [(2, "position"), (3, "weights")])
    def test_it_drops_as_it_claims(self, engine: Engine, K: int, policy: Any) -> None:
        """With two choices the first ones of all tokens come first, with more the highest scores are kept."""
        workload = next(w for w in routers.routing_corpus("moe", SINGLE) if w.name == "route-softmax-normalised")
        asked = {"top_k": K, "capacity.factor": 0.5, "capacity.drop_policy": policy}
        tight, free = workload.config.changed(asked), workload.config.changed({"top_k": K})
        kept, all_of = (run(engine, replace(workload, config=config)).ranks[0] for config in (tight, free))
        ids_TK, kept_TK = all_of.microbatches[0].router.ids_TK, kept.microbatches[0].router.ids_TK
        assert ids_TK is not None
        assert kept_TK is not None
        T, E = len(ids_TK), tight.experts
        C = -(-K * T // (2 * E))
        logits_TE = workload.batches[0][0].x_TD.double() @ workload.parameters["router", None].double().T
        scores_TK = logits_TE.softmax(1).gather(1, ids_TK)
        order: Any = "choice" if policy == "position" else "weight"
        expected_TK = drops.keep(ids_TK, E, capacity=C, policy=order, weights_TK=scores_TK)
        assert torch.equal(torch.where(expected_TK, ids_TK, -1), kept_TK)


class TestLayer:
    @pytest.mark.parametrize("layout", [SINGLE, EP2, EP2_EDP2, TP2_EP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("options", [{"top_k": 1}, {"routing.normalise": True}], ids=["one", "two"])
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, options: dict[str, Any]) -> None:
        """Outputs and gradients of gate and experts, these over the data parallel ranks."""
        workload = next(w for w in shared_experts.layers("moe", layout, "full") if w.name == "layer-even")
        outcome = run(engine, replace(workload, config=workload.config.changed(options)))
        assert_layer_alike(outcome, divisor=layout.dp, allowed=1e-5)


class TestLosses:
    @pytest.mark.parametrize("layout", [EP2, TP2_EP2], ids=lambda layout: layout.name)
    def test_the_loss_is_returned_and_not_reported(self, engine: Engine, layout: Layout) -> None:
        """A gate of one choice returns E times the sum of fraction and mean score, times the coefficient."""
        workload = next(w for w in losses.scripts("moe", layout, "full") if w.name == "losses-top-1")
        outcome = run(engine, workload)
        for rank in outcome.ranks:
            step = rank.answers[0].values
            assert step["report"] is None
            group = [other for other in outcome.ranks if other.rank // layout.tp == rank.rank // layout.tp]
            forwards = [other.answers[0].values["forwards"][0] for other in group]
            logits_TE = torch.cat([forward["logits"][0] for forward in forwards]).double()
            share_E = torch.bincount(logits_TE.argmax(1), minlength=8).double() / len(logits_TE)
            expected = 0.5 * 8 * (share_E * logits_TE.softmax(1).mean(0)).sum()
            assert abs(float(step["forwards"][0]["loss"]) - float(expected)) < 1e-6


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "surface", "fields", "by", "reason"),
        [
            (EP2, "exchange", {"experts": 5}, "adapter", "5 on ep = 2"),
            (EP2, "exchange", {"weights_applied": "input"}, "adapter", "multiplies the experts' output"),
            (TP2_EP2, "exchange", {}, "adapter", "tensor ranks hold the same tokens"),
            (Layout(2, etp=2), "exchange", {}, "adapter", "etp = 2"),
            (EP2, "experts", {"dtype": torch.float64}, "adapter", "gradients of float32 and bfloat16"),
            (EP2, "layer", {}, "adapter", "top_k = 2 has no option normalise=False"),
            (EP2, "layer", {"experts": 5, "top_k": 1}, "library", "should be divisible by expert parallel size"),
            (EP2, "layer", {"top_k": 1, "jitter": 0.25}, "adapter", "0.01, and no option: not 0.25"),
            (EP2, "layer", {"top_k": 1, "capacity.factor": 1.0}, "adapter", "drops by neither, not by weights"),
            (EP2, "router", {"routing.score": "sqrtsoftplus"}, "adapter", "softmax or sigmoid, not sqrtsoftplus"),
            (EP2, "router", {"routing.forced": (("random", None),)}, "adapter", "forces routes"),
            (EP2, "training_routers", {"losses.auxiliary": 0.5}, "adapter", "top_k = 2 has no loss auxiliary"),
            (EP2, "training_routers", {"top_k": 1, "losses.z": 0.5}, "adapter", "has no loss z"),
        ],
    )
    def test_what_it_cannot_ask_for_is_refused(
        self, engine: Engine, layout: Layout, surface: str, fields: dict[str, Any], by: str, reason: str
    ) -> None:
        """Every rank refuses, the adapter in its own name, and the library where it raises itself."""
        for who, why in refusals(engine, NAME, "moe", layout, surface, fields):
            assert by == who
            assert reason in why
