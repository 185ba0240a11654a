"""The adapter to transformers, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_conformance.backends.shared_batch import SharedBatch
from moe_conformance.backends.transformers import Transformers
from moe_conformance.backends.transformers.router import model_of
from moe_conformance.chapters.losses import workloads as losses
from moe_conformance.contract import Config, Delivery, Session, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads import recipes, routers
from moe_conformance.workloads.records import features
from moe_conformance.workloads.records.workload import ParameterKey, Workload
from self_tests.backends.asking import finished, prepared
from self_tests.backends.dense import (
    assert_equal_to_the_bit,
    assert_layer_alike,
    assert_routed_alike,
    oracle,
    seen,
    worst,
)
from self_tests.backends.trained import assert_trained_alike, trained

try:
    Transformers().versions()  # importing the library here would take seconds: only the ranks need it
except Unsupported as missing:
    pytest.skip(str(missing), allow_module_level=True)

NAME = "moe_conformance.backends.transformers:Transformers"
_SINCE_5_24 = pytest.mark.skipif(find_spec("transformers.models.lara_mini") is None, reason="a model of 5.24")
CPU = torch.device("cpu")
EP2, EP2_EDP2, TP2_EP2, TP2 = Layout(2, ep=2), Layout(4, ep=2), Layout(4, tp=2, ep=2), Layout(2, tp=2, ep=2)
EDP2 = Layout(2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported transformers already."""
    with prepared(Transformers) as started:
        yield started


def pinned(variant: str, layout: Layout, name: str) -> Workload:
    """The pinned workload of that name."""
    return next(w for w in recipes.corpus(variant, layout, "full") if w.name == name)


def session(layout: Layout) -> Session:
    """A session of rank 0 that may build what needs no process group."""
    return Transformers().open(Topology(layout, 0, {}), CPU)


def shared(context: RankContext, layout: Layout) -> list[list[float]]:
    """On a rank with 3 tokens or 1: the shared batch, this rank's part of it, and the gradients of both ways."""
    group = Topology(layout, context.rank, context.groups).group("tp")
    T = (3, 1)[context.rank]
    own = (10.0 * context.rank + torch.arange(float(T)))[:, None].requires_grad_()
    batch = SharedBatch(T, group, CPU)
    of_all = batch.of_all(own)
    back = batch.local_rows(of_all * torch.arange(1.0, 5.0)[:, None])
    back.backward(torch.full_like(back, 2.0 + context.rank))
    assert own.grad is not None
    return [each.flatten().tolist() for each in (of_all.detach(), back.detach(), own.grad)]


def grown_by_another_factor(context: RankContext, layout: Layout) -> float:
    """On a rank: by how much expert gradients grow if the library divides by the number of replicas, not of batches."""
    from transformers.distributed import DistributedConfig

    built = Transformers().open(Topology(layout, context.rank, context.groups), context.device)
    of_replicas = property(lambda asked: asked.efsdp_size)
    sums = []
    for factor in (nullcontext(), patch.object(DistributedConfig, "dp_size", of_replicas)):
        with factor:
            experts = built.experts(Config("alltoall"))
        for window in experts.named(lambda parameter: parameter.data):
            window.view.fill_(0.125)
        held = Config.experts // layout.ep
        rows_RD, ids_RJ, weights_RJ = torch.ones(held, Config.hidden), torch.arange(held)[:, None], torch.ones(held, 1)
        experts(Delivery.listed(rows_RD, ids_RJ, weights_RJ)).sum().backward()
        grads = [window.view for window in experts.named(lambda parameter: parameter.grad)]
        sums.append(sum(float(grad.double().sum()) for grad in grads))
    return sums[1] / sums[0]


class TestModule:
    def test_importing_the_adapter_does_not_import_the_library(self) -> None:
        """A driver that only lists backends stays light."""
        code = "import sys, moe_conformance.backends.transformers; sys.exit('transformers' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode

    def test_versions_name_the_library(self) -> None:
        """Verdicts can be told apart by the version that they are about."""
        assert {"transformers", "torch"} == set(Transformers().versions())


class TestSharedBatch:
    def test_tokens_go_into_one_batch_and_come_back(self, engine: Engine) -> None:
        """Rank 1's tokens come first; every rank gets its own back, and the gradient of what it gave."""
        result = engine.run(Job(f"{__name__}:shared", TP2, 2, TP2.groups(), deadline_s=30.0))
        assert ["ok", "ok"] == [rank.status for rank in result.ranks], [rank.error for rank in result.ranks]
        batch = [10.0, 0.0, 1.0, 2.0]
        assert [batch, [0.0, 3.0, 8.0], [4.0, 6.0, 8.0]] == result.ranks[0].value
        assert [batch, [10.0], [3.0]] == result.ranks[1].value


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, TP2_EP2, Layout(4, tp=2, ep=4)], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        "name",
        [
            "uneven",
            "rank-without-tokens",
            "one-expert-even",
            "idle-rank-even",
            "top-all-even",
            "duplicates-even",
            "two-dims-even",
            "in-flight-uneven",
            "uneven-bfloat16",
        ],
    )
    def test_the_all_to_all_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        self.check(finished(engine, NAME, pinned("alltoall", layout, name)))

    @pytest.mark.parametrize(
        "name", ["uneven", "rank-without-tokens", "idle-rank-even", "dropped-even", "even-bfloat16"]
    )
    def test_the_all_reduce_computes_the_layer(self, engine: Engine, name: str) -> None:
        """With masked experts elsewhere, empty slots included."""
        self.check(finished(engine, NAME, pinned("allreduce", TP2_EP2, name)))

    def check(self, outcome: Outcome) -> None:
        """Compare to the bit."""
        assert_equal_to_the_bit(outcome)

    @pytest.mark.parametrize(
        ("variant", "layout", "told"),
        [
            ("alltoall", EP2, ("AllToAllEP", "combine")),
            ("auto", TP2_EP2, ("AutoEP", "combine")),
            ("allreduce", TP2_EP2, ("AllReduceEP", "expert")),
            ("alltoall", Layout(1), ("none", "expert")),
        ],
    )
    def test_it_says_what_it_built(self, engine: Engine, variant: str, layout: Layout, told: tuple[str, str]) -> None:
        """The class of the implementation, and where that applies the weights."""
        rank = finished(engine, NAME, pinned(variant, layout, "even")).ranks[0]
        assert told == (rank.resolved["implementation"], rank.weights_at)
        assert ("tokens" in rank.resolved) == (layout.tp > 1)

    def test_it_says_after_every_forward_where_it_weighed(self, engine: Engine) -> None:
        """AutoEP reduces in inference, where experts weigh, and exchanges in training, where combine does."""
        ranks = finished(engine, NAME, pinned("auto", TP2_EP2, "inference-even")).ranks
        for rank in ranks:
            assert ["expert", "combine", "expert"] == [seen.exchange.weights_at for seen in rank.microbatches]
        handed = [[call for rank in ranks for call in rank.microbatches[m].exchange.handed] for m in range(3)]
        unrouted = [any(bool((call.ids_RJ < 0).all(1).any()) for call in calls) for calls in handed]
        assert [True, False, True] == unrouted


class TestExperts:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2, TP2_EP2, TP2, EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        ("variant", "name", "allowed"),
        [
            ("alltoall", "own-uneven", 1e-6),
            ("alltoall_batched_mm", "own-odd-experts-even", 1e-6),
            ("auto", "own-rank-without-tokens", 1e-6),
            ("auto", "own-uneven-bfloat16", 0.02),
        ],
    )
    def test_gradients_are_averaged_over_batches(
        self, engine: Engine, layout: Layout, variant: str, name: str, allowed: float
    ) -> None:
        """Every element of every expert is held once per replica set, with the gradient over dp * cp."""
        self.check(finished(engine, NAME, pinned(variant, layout, name)), allowed)

    def test_the_library_divides_them(self, engine: Engine) -> None:
        """A library that divides by the two replicas of an expert, and not by the four batches, is not mended."""
        function = f"{__name__}:grown_by_another_factor"
        result = engine.run(Job(function, EP2_EDP2, EP2_EDP2.world, EP2_EDP2.groups(), deadline_s=30.0))
        assert [("ok", 2.0)] * 4 == [(rank.status, rank.value) for rank in result.ranks]

    @pytest.mark.parametrize("variant", ["allreduce", "allreduce_batched_mm", "allreduce_grouped_mm"])
    def test_masked_tokens_add_nothing(self, engine: Engine, variant: str) -> None:
        """Tokens whose experts are elsewhere leave no trace in outputs and gradients."""
        self.check(finished(engine, NAME, pinned(variant, TP2_EP2, "own-dropped-even")), 1e-6)

    def check(self, outcome: Outcome, allowed: float) -> None:
        """Compare outputs, and gradients against the largest of them."""
        layout, expected = outcome.workload.layout, oracle(outcome.workload)
        assert worst(seen(outcome)[0], expected.y_TD) < allowed
        largest = max(float(value.abs().max()) for value in expected.parameters.values())
        held: dict[ParameterKey, int] = dict.fromkeys(expected.parameters, 0)
        for rank in outcome.ranks:
            assert () == rank.uncovered
            assert rank.grads_final is not None
            for key, grad in rank.grads_final.items():
                assert grad.value is not None
                wanted = shard_of(expected.parameters[key], grad.shard) / (layout.dp * layout.cp)
                assert float((grad.value.double() - wanted).abs().max()) / largest < allowed
                held[key] += grad.value.numel()
        assert {key: value.numel() for key, value in expected.parameters.items()} == held


class TestRouter:
    @pytest.mark.parametrize(
        ("name", "model"),
        [
            ("route-softmax", "qwen3_moe"),
            ("route-softmax-normalised", "qwen3_moe"),
            ("route-softmax-scaled", "deepseek_v2"),
            ("route-groups-max", "deepseek_v2"),
            ("route-softmax-topk", "gpt_oss"),
            ("route-sigmoid-biased-normalised-scaled", "deepseek_v3"),
            ("route-groups-top2", "deepseek_v3"),
            ("route-groups-top2-softmax", "mistral4"),
            ("route-softmax-normalised-scaled", "mistral4"),
            ("route-sqrtsoftplus-biased-normalised", "deepseek_v4"),
            ("route-odd-experts", "qwen3_moe"),
        ],
    )
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, name: str, model: str) -> None:
        """The router of the model that has the rule: the same experts, the same weights."""
        workload = next(w for w in routers.routing_corpus("alltoall", Layout(2)) if w.name == name)
        outcome = finished(engine, NAME, workload)
        assert model == model_of(workload.config)
        assert_routed_alike(outcome, 1e-6)

    def test_its_gradient_is_reduced_over_the_batches(self, engine: Engine) -> None:
        """FSDP2 shards it over the ranks with other tokens, and each has its part of the mean gradient."""
        workload = next(w for w in routers.routing_corpus("alltoall", EP2) if w.name == "route-softmax")
        outcome = finished(engine, NAME, workload)
        for rank in outcome.ranks:
            assert "apply_fully_sharded_data_parallelism" == rank.resolved["reduction"]
            assert rank.grads_final is not None
            grad = rank.grads_final["router", None]
            assert (0, rank.rank, 2) == grad.shard

    @pytest.mark.parametrize(("score", "told"), [("softmax", torch.float32), ("softmax_topk", torch.float64)])
    def test_it_says_in_what_it_was_seen_to_compute(self, engine: Engine, score: Any, told: torch.dtype) -> None:
        """Qwen's router casts scores of float32 back to its tokens' float64, GPT-OSS's computes in float64."""
        workload = next(w for w in routers.routing_corpus("alltoall", Layout(2)) if w.name == "route-float64")
        outcome = finished(engine, NAME, replace(workload, config=workload.config.changed({"routing.score": score})))
        assert [told, told] == [rank.claims.dtype for rank in outcome.ranks]


class TestLayer:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        ("name", "block"),
        [
            ("layer-even", "Qwen3MoeSparseMoeBlock"),
            ("shared-gate-even", "Qwen2MoeSparseMoeBlock"),
            ("shared-as-routed-uneven", "DeepseekV2Moe"),
            ("shared-bias-even", "DeepseekV2Moe"),
            ("shared-as-routed-several-scaled-even", "DeepseekV3MoE"),
            ("shared-scaled-even", "Dots3NoteTextMoE"),
            pytest.param("shared-even", "LaraMiniSparseMoeBlock", marks=_SINCE_5_24),
        ],
    )
    def test_it_computes_the_block(self, engine: Engine, layout: Layout, name: str, block: str) -> None:
        """The block of the model: its output is the oracle's, and so is every part of a mean of gradients."""
        outcome = finished(
            engine, NAME, next(w for w in shared_experts.layers("alltoall", layout, "full") if w.name == name)
        )
        assert {block} == {rank.resolved["layer"] for rank in outcome.ranks}
        assert_layer_alike(outcome, divisor=layout.world, allowed=1e-5)


class TestLosses:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2, TP2_EP2], ids=lambda layout: layout.name)
    def test_the_loss_is_that_of_the_shared_batch(self, engine: Engine, layout: Layout) -> None:
        """It is returned, E times the sum of slots per token and mean score, and FSDP2 holds parts of its gradient."""
        workload = next(w for w in losses.scripts("alltoall", layout, "full") if w.name == "losses-auxiliary")
        outcome = finished(engine, NAME, workload)
        for rank in outcome.ranks:
            step = rank.answers[0].values
            assert step["report"] is None
            group = [other for other in outcome.ranks if other.rank // layout.tp == rank.rank // layout.tp]
            forwards = [other.answers[0].values["forwards"][0] for other in group]
            logits_TE = torch.cat([forward["logits"][0] for forward in forwards]).double()
            slots_E = torch.bincount(logits_TE.topk(2).indices.flatten(), minlength=8).double() / len(logits_TE)
            expected = 0.5 * 8 * (slots_E * logits_TE.softmax(1).mean(0)).sum()
            assert abs(float(step["forwards"][0]["loss"]) - float(expected)) < 1e-6
            assert (None if layout.dp == 1 else (0, rank.rank // layout.tp, layout.dp)) == step["shards"][0]


class TestTrainer:
    @pytest.mark.parametrize(
        ("layout", "name", "places"),
        [
            (Layout(1), "train-adamw", ("not sharded", "not sharded")),
            (EP2_EDP2, "train-sgd-clipped", ("('efsdp', 'ep')", "('fsdp',)")),
        ],
        ids=lambda given: given.name if isinstance(given, Layout) else None,
    )
    def test_it_trains(self, engine: Engine, layout: Layout, name: str, places: tuple[str, str]) -> None:
        """Some steps of one device and of four ranks, whose norm is put together of those of two meshes."""
        outcome = trained(engine, NAME, "alltoall", layout, name)
        assert_trained_alike(outcome, allowed=1e-3)
        resolved = outcome.ranks[0].resolved
        assert (True, True) == (resolved["experts"].endswith(places[0]), resolved["router"].endswith(places[1]))


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "surface", "fields", "reason"),
        [
            (EP2, "exchange", {"variant": "deepep"}, "variant 'deepep' is not one of"),
            (EP2, "exchange", {"variant": "alltoall", "experts": 5}, "5 on ep = 2"),
            (
                EP2,
                "exchange",
                {"variant": "alltoall", "weights_applied": "input"},
                "not weights_applied='input'",
            ),
            (Layout(2, etp=2), "exchange", {"variant": "alltoall"}, "etp = 2"),
            (Layout(2, tp=2), "experts", {"variant": "alltoall"}, "tp = 2 with ep = 1"),
            (Layout(1), "exchange", {"variant": "allreduce"}, "installs no implementation"),
            (
                EP2,
                "router",
                {"routing.score": "sqrtsoftplus"},
                "no router is adapted to score='sqrtsoftplus', normalise=False",
            ),
            (TP2_EP2, "trainer", {"variant": "alltoall"}, "adapted for dp and ep alone"),
            (Layout(1), "trainer", {"variant": "allreduce"}, "installs no implementation"),
            (EP2, "router", {"routing.groups": (4, 2), "routing.group_score": "topk_sum"}, "group_score='topk_sum'"),
            (EP2, "router", {"routing.score": "sigmoid", "experts": 1, "top_k": 1}, "two experts in a group: 1 in all"),
        ],
    )
    def test_what_it_cannot_ask_for_is_refused(
        self, layout: Layout, surface: str, fields: dict[str, Any], reason: str
    ) -> None:
        """The adapter says what was asked and refuses in its own name, not in the library's."""
        with pytest.raises(Unsupported, match=reason) as refusal:
            getattr(session(layout), surface)(Config().changed(fields))
        assert "adapter" == refusal.value.by

    @pytest.mark.parametrize(
        ("layout", "fields", "reason"),
        [
            (EP2, {"shared.ffn": (24,), "shared.bias": True}, "shared experts of the routed ones' width 16"),
            (EP2, {"shared.ffn": (16,), "routing.score": "softmax_topk"}, "shared experts that have no gate"),
            (EP2, {"shared.ffn": (16,), "shared.overlap": True}, "does not map shared.overlap"),
            (EP2, {"shared.ffn": (16,), "shared.gate": True, "shared.bias": True}, "qwen2_moe have no biases"),
            (EP2, {"shared.ffn": (16, 16), "shared.bias": True}, "it has one bias"),
            (EP2, {"routing.score": "sigmoid"}, "no block is adapted to the router of deepseek_v3"),
            (TP2_EP2, {"shared.ffn": (16,)}, "splits the shared experts of deepseek_v2"),
            (Layout(4, ep=4), {"shared.ffn": (16, 24), "shared.gate": True}, "no equal part of block 0"),
        ],
    )
    def test_blocks_that_no_model_has_are_refused(self, layout: Layout, fields: dict[str, Any], reason: str) -> None:
        """And so are those whose parameters lie on ranks in parts that no window is on."""
        with pytest.raises(Unsupported, match=reason) as refusal:
            session(layout).layer(Config(variant="alltoall").changed(fields))
        assert "adapter" == refusal.value.by

    @pytest.mark.parametrize(
        ("variant", "layout", "reason"),
        [
            ("alltoall", Layout(4, tp=4, ep=2), "`ep_size` must be a multiple of `tp_size`"),
            ("alltoall", Layout(4, pp=2, ep=2), "pipeline parallelism is not supported yet"),
            ("allreduce", EP2, "AllReduceEP needs every rank of the expert group to hold the same batch"),
        ],
    )
    def test_what_the_library_refuses_is_proved(
        self, engine: Engine, variant: str, layout: Layout, reason: str
    ) -> None:
        """The library's own error, raised while it is built, on every rank."""
        ranks = moe_step(engine, NAME, pinned(variant, layout, "even")).ranks
        assert {("refused", "library")} == {(rank.status, rank.error_by) for rank in ranks}
        assert all(reason in (rank.error or "") for rank in ranks)

    @pytest.mark.parametrize(("variant", "limited"), [("alltoall", True), ("auto", True), ("allreduce", False)])
    def test_empty_slots_are_for_the_all_reduce_only(self, variant: str, limited: bool) -> None:
        """The all-to-all would leave ranks waiting; the all-reduce masks them."""
        broken = features.broken(Transformers().limits(variant), pinned(variant, TP2_EP2, "dropped-even"), "cpu")
        assert ("dropped_slots" if limited else None) == (broken and broken.on)
