"""The adapter to torchtitan, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_conformance.backends.torchtitan import TorchTitan
from moe_conformance.backends.torchtitan.fast_paths import FastPaths
from moe_conformance.chapters.overload.workloads.conditions import scripts as metered
from moe_conformance.contract import Config, Session, Training, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import swiglu_experts
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads import recipes, routers
from moe_conformance.workloads.records import features
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import ParameterKey, Workload
from self_tests.backends.asking import prepared
from self_tests.backends.dense import (
    assert_equal_to_the_bit,
    assert_layer_alike,
    assert_routed_alike,
    oracle,
    seen,
    worst,
)
from self_tests.backends.trained import assert_trained_alike, trained

pytest.importorskip("torchtitan")

NAME = "moe_conformance.backends.torchtitan:TorchTitan"
CPU = torch.device("cpu")
EP2, EP2_EDP2, EP4 = Layout(2, ep=2), Layout(4, ep=2), Layout(4, ep=4)
TP2_EP2 = Layout(4, tp=2, ep=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported torchtitan already."""
    with prepared(TorchTitan) as engine:
        yield engine


def run(engine: Engine, variant: str, layout: Layout, name: str) -> Outcome:
    """Run the pinned workload of that name, which every rank must finish."""
    workload = next(w for w in recipes.corpus(variant, layout, "full") if w.name == name)
    outcome = moe_step(engine, NAME, workload)
    assert ["ok"] * layout.world == [rank.status for rank in outcome.ranks], [rank.error for rank in outcome.ranks]
    return outcome


def session(layout: Layout) -> Session:
    """A session of rank 0 that may build what needs no process group."""
    return TorchTitan().open(Topology(layout, 0, {}), CPU)


class TestModule:
    def test_the_release_of_the_number_of_main_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """0.2.2 as published has none of the modules that main, which calls itself 0.2.2, has."""
        (tmp_path / "torchtitan").mkdir()
        (tmp_path / "torchtitan" / "__init__.py").touch()
        (tmp_path / "assets").mkdir()
        (tmp_path / "assets" / "version.txt").write_text("0.2.2")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(Unsupported, match="it has no torchtitan"):
            TorchTitan().versions()

    def test_importing_the_adapter_does_not_import_the_library(self) -> None:
        """A driver that only lists backends stays light."""
        code = "import sys, moe_conformance.backends.torchtitan; sys.exit('torchtitan' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode

    def test_versions_name_the_library(self) -> None:
        """Verdicts can be told apart by the version that they are about."""
        assert {"torchtitan", "spmd_types", "torch"} <= set(TorchTitan().versions())

    def test_a_torchtitan_without_shortcuts_is_none_of_the_fork(self) -> None:
        """The backend of the fork's shortcuts refuses what is installed here, and says what it takes."""
        with pytest.raises(Unsupported, match="no shortcuts: saforem2/torchtitan has, at 8d22a86d"):
            FastPaths().versions()

    def test_close_gives_the_global_setting_back(self) -> None:
        """The library's SPMD setting after a session is the one before it."""
        from torchtitan.distributed.utils import get_spmd_backend

        before = get_spmd_backend()
        opened = session(EP2)
        assert "partial_dtensor" == get_spmd_backend()
        opened.close()
        assert before == get_spmd_backend()


class TestExchange:
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
            "two-dims-even",
            "in-flight-uneven",
            "halves-in-flight-uneven",
            "uneven-bfloat16",
        ],
    )
    @pytest.mark.parametrize("variant", ["alltoall", "torchao"])
    def test_it_computes_the_layer(self, engine: Engine, variant: str, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        if variant == "torchao":
            pytest.importorskip("torchao")
        outcome = run(engine, variant, EP2, name)
        assert_equal_to_the_bit(outcome)

    def test_the_local_dispatcher_computes_the_layer(self, engine: Engine) -> None:
        """Without expert parallelism nothing is sent."""
        outcome = run(engine, "local", Layout(2), "uneven")
        assert torch.equal(oracle(outcome.workload).y_TD, seen(outcome)[0])
        assert "local" == outcome.ranks[0].resolved["path"]

    def test_it_says_what_it_built(self, engine: Engine) -> None:
        """The dispatcher names its class and the size of its mesh."""
        resolved = run(engine, "alltoall", EP4, "uneven").ranks[0].resolved
        assert ("AllToAllTokenDispatcher", "all_to_all over 4 ranks") == (resolved["dispatcher"], resolved["path"])

    def test_padding_is_claimed(self, engine: Engine) -> None:
        """Every expert's count is a multiple of 16 with torchao, 16 where nothing came."""
        pytest.importorskip("torchao")
        outcome = run(engine, "torchao", EP2, "empty-expert-even")
        counts_N = outcome.ranks[0].microbatches[0].exchange.handed[0].counts_N
        assert counts_N is not None
        assert 16 == int(counts_N[1])  # expert 1 is the empty one
        assert [0] * 4 == (counts_N % 16).tolist()


class TestExperts:
    @pytest.mark.parametrize("name", ["own-rank-without-tokens", "own-in-flight-uneven", "own-uneven-bfloat16"])
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2, Layout(4, ep=2, tp=2)], ids=lambda layout: layout.name)
    def test_gradients_are_summed_over_all_ranks(self, engine: Engine, layout: Layout, name: str) -> None:
        """After finishing, every element of every expert is held once per replica set, with the global gradient."""
        outcome = run(engine, "alltoall", layout, name)
        expected = oracle(outcome.workload)
        assert worst(seen(outcome)[0], expected.y_TD) < 0.03  # the experts multiply in bfloat16
        largest = max(float(value.abs().max()) for value in expected.parameters.values())
        held: dict[ParameterKey, int] = dict.fromkeys(expected.parameters, 0)
        for rank in outcome.ranks:
            assert () == rank.uncovered
            assert rank.grads_final is not None
            for key, grad in rank.grads_final.items():
                assert grad.value is not None
                wanted = shard_of(expected.parameters[key], grad.shard)
                assert float((grad.value.double() - wanted).abs().max()) / largest < 0.03
                held[key] += grad.value.numel()
        assert {key: value.numel() for key, value in expected.parameters.items()} == held

    def test_a_rank_has_its_own_gradient_before(self, engine: Engine) -> None:
        """Before finishing, a replica's gradient is that of the tokens of its ep group alone."""
        outcome = run(engine, "alltoall", EP2_EDP2, "own-even")
        workload = outcome.workload
        group = [layer.Batch(b.x_TD, b.ids_TK, b.weights_TK, b.upstream) for b in workload.batches[0][:2]]
        expected = layer.gradients(*layer.global_batch(group), swiglu_experts, workload.parameters).parameters
        largest = max(float(value.abs().max()) for value in expected.values())
        local = outcome.ranks[0].grads_local
        assert 3 * len(outcome.ranks[0].local_experts) == len(local)
        for key, grad in local.items():
            assert grad.value is not None
            assert float((grad.value.double() - expected[key]).abs().max()) / largest < 0.03

    def test_experts_narrower_than_their_ranks_are_split(self, engine: Engine) -> None:
        """With more ranks than experts FSDP2 shards within an expert, and the windows say so."""
        workload = next(w for w in recipes.corpus("alltoall", EP2_EDP2, "full") if w.name == "own-one-expert-even")
        E = 2
        config = Config(variant="alltoall", experts=E, top_k=1)
        batches = tuple(
            tuple(type(b)(b.x_TD, b.ids_TK % E, b.weights_TK, b.upstream) for b in ranks) for ranks in workload.batches
        )
        parameters = {key: value for key, value in workload.parameters.items() if key[1] is not None and key[1] < E}
        narrow = Workload("narrow", ExpertsStep(), config, EP2_EDP2, batches, parameters=parameters)
        outcome = moe_step(engine, NAME, narrow)
        expected = oracle(narrow).parameters
        largest = max(float(value.abs().max()) for value in expected.values())
        finals = [rank.grads_final for rank in outcome.ranks]
        assert [(0, 0, 2), (0, 0, 2), (0, 1, 2), (0, 1, 2)] == [
            next(iter(final.values())).shard for final in finals if final is not None
        ]
        for final in finals:
            assert final is not None
            for key, grad in final.items():
                assert grad.value is not None
                wanted = shard_of(expected[key], grad.shard)
                assert float((grad.value.double() - wanted).abs().max()) / largest < 0.03

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    def test_the_library_multiplies_in_bfloat16(self) -> None:
        """A float32 input and the same rounded to bfloat16 have one output: what the adapter's docstring says."""
        from torchtitan.models.common.moe import GroupedExperts

        draw = torch.Generator().manual_seed(3)
        module = GroupedExperts.Config(dim=16, hidden_dim=8, num_experts=2).build()
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw)
        x_RD, counts_N = torch.randn(5, 16, generator=draw), torch.tensor([2, 3])
        rounded_RD = x_RD.bfloat16().float()
        assert not torch.equal(rounded_RD, x_RD)
        assert torch.equal(module(rounded_RD, counts_N), module(x_RD, counts_N))


class TestRouter:
    @pytest.mark.parametrize(
        "name",
        [
            "route-softmax",
            "route-softmax-normalised",
            "route-sigmoid-biased-normalised-scaled",
            "route-groups-top2",
            "route-top-all",
            "route-odd-experts",
            "route-float64",
        ],
    )
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, name: str) -> None:
        """The same experts, the same weights, and the true load."""
        workload = next(w for w in routers.routing_corpus("alltoall", Layout(2)) if w.name == name)
        outcome = moe_step(engine, NAME, workload)
        assert_routed_alike(outcome, 1e-6)
        for rank in outcome.ranks:
            found = rank.microbatches[0]
            assert found.router.counts_E is not None
            assert found.router.ids_TK is not None
            load_E = torch.bincount(found.router.ids_TK.flatten(), minlength=workload.config.experts)
            assert torch.equal(load_E, found.router.counts_E.long())

    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2], ids=lambda layout: layout.name)
    def test_its_gradient_is_summed_over_all_ranks(self, engine: Engine, layout: Layout) -> None:
        """Every rank holds its rows of the gradient over the tokens of all ranks."""
        workload = next(w for w in routers.routing_corpus("alltoall", layout) if w.name == "route-in-flight")
        outcome = moe_step(engine, NAME, workload)
        assert_routed_alike(outcome, 1e-6)
        local = [rank.grads_local["router", None].value for rank in outcome.ranks]
        whole = torch.stack([value for value in local if value is not None]).sum(0)
        for index, rank in enumerate(outcome.ranks):
            assert rank.grads_final is not None
            final = rank.grads_final["router", None]
            assert (0, index, layout.world) == final.shard
            assert final.value is not None
            assert torch.allclose(final.value, shard_of(whole, final.shard), rtol=1e-5, atol=1e-6)

    def test_over_tp_the_reduction_is_not_adapted(self, engine: Engine) -> None:
        """It is refused by name, not passed over."""
        layout = Layout(4, tp=2, ep=2)
        workload = next(w for w in routers.routing_corpus("alltoall", layout) if w.name == "route-in-flight")
        rank = moe_step(engine, NAME, workload).ranks[0]
        assert rank.grads_final is None
        assert "the reduction of this router's gradients is not adapted" in str(rank.finish_refusal)


class TestMeter:
    def test_the_counter_has_the_pairs_of_training(self, engine: Engine) -> None:
        """Of every layer and microbatch, without evaluation; a forward that is computed again counts twice (TT-19)."""
        workload = next(w for w in metered("alltoall", EP2, "quick") if w.name == "load-recomputed-alike")
        outcome = moe_step(engine, NAME, workload)
        run, report = workload.calls
        for rank, seen_rank in enumerate(outcome.ranks):
            expected = torch.zeros(8, dtype=torch.int64)
            for entry in run.given[rank]["passes"]:
                if entry.kind == "forward":
                    expected += (1 + entry.recomputed) * torch.bincount(entry.ids_TK.flatten(), minlength=8)
            assert expected.tolist() == seen_rank.answers[1].values["counts_E"].tolist()
        assert "report" == report.method


class TestGroups:
    def test_they_are_those_of_its_meshes(self) -> None:
        """Expert parallelism folds into cp and tp, innermost; no process group is made."""
        groups = TorchTitan().groups({"world": 8, "tp": 2, "cp": 2, "pp": 1, "ep": 4, "etp": 1})
        assert ((0, 1, 2, 3), (4, 5, 6, 7)) == groups["ep"]
        assert ((0, 4), (1, 5), (2, 6), (3, 7)) == groups["edp"]
        assert ((0, 2, 4, 6), (1, 3, 5, 7)) == groups["dp_cp"]

    def test_sizes_that_it_refuses_are_refused_by_it(self) -> None:
        """An ep that does not divide the ranks is refused by the library, etp by the adapter."""
        sizes = {"world": 4, "tp": 1, "cp": 1, "pp": 1, "ep": 3, "etp": 1}
        for wrong, by in (({}, "library"), ({"ep": 1, "etp": 2}, "adapter")):
            with pytest.raises(Unsupported) as refusal:
                TorchTitan().groups({**sizes, **wrong})
            assert by == refusal.value.by


class TestLayer:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2, Layout(2)], ids=lambda layout: layout.name)
    @pytest.mark.parametrize("name", ["layer", "shared-gate", "shared", "shared-bias-gate"])
    def test_it_computes_the_module(self, engine: Engine, layout: Layout, name: str) -> None:
        """Outputs and summed gradients of the router, the experts and the shared experts, in bfloat16."""
        workload = next(
            w for w in shared_experts.layers("alltoall", layout, "full") if w.name == f"{name}-even-bfloat16"
        )
        outcome = moe_step(engine, NAME, workload)
        assert ["ok"] * layout.world == [rank.status for rank in outcome.ranks], [rank.error for rank in outcome.ranks]
        assert_layer_alike(outcome, divisor=1, allowed=0.03)

    @pytest.mark.parametrize(
        ("layout", "name"),
        [(TP2_EP2, "layer-uneven"), (TP2_EP2, "shared-even-bfloat16"), (Layout(4, tp=2, ep=4), "layer-even-bfloat16")],
        ids=lambda given: given if isinstance(given, str) else given.name,
    )
    def test_it_computes_the_module_over_tp(self, engine: Engine, layout: Layout, name: str) -> None:
        """With sequence parallelism, placed by the library's sharding configs; shared experts are cut over tp."""
        workload = next(w for w in shared_experts.layers("alltoall", layout, "full") if w.name == name)
        outcome = moe_step(engine, NAME, workload)
        assert ["ok"] * layout.world == [rank.status for rank in outcome.ranks], [rank.error for rank in outcome.ranks]
        assert_layer_alike(outcome, divisor=1, allowed=0.03)
        assert "Shard" in outcome.ranks[0].resolved["shards"]


class TestTrainer:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2], ids=lambda layout: layout.name)
    def test_it_trains_a_step(self, engine: Engine, layout: Layout) -> None:
        """Loss, norm and moments in bfloat16, with experts and all else on meshes of their own."""
        outcome = trained(engine, NAME, "alltoall", layout, "train-clipped-bfloat16")
        assert_trained_alike(outcome, allowed=0.03)
        resolved = outcome.ranks[0].resolved
        assert ("AdamW", "torch.float32") == (resolved["optimizer"], resolved["parameters"])
        assert "('efsdp', 'ep')" in resolved["experts"]
        assert "('fsdp',)" in resolved["router"]

    def test_an_optimizer_that_it_does_not_have_is_refused_by_it(self) -> None:
        """Its container has no SGD."""
        from moe_conformance.backends.torchtitan.trainer import optimizers

        with pytest.raises(Unsupported, match="Optimizer SGD not added") as refusal:
            optimizers(Training(optimiser="sgd"), torch.nn.Linear(1, 1))
        assert "library" == refusal.value.by


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "surface", "fields", "reason"),
        [
            (EP2, "exchange", {"variant": "local"}, "no expert parallelism: ep = 2"),
            (EP2, "exchange", {"variant": "deepep"}, "variant 'deepep' is not one of"),
            (EP2, "exchange", {"variant": "alltoall", "experts": 5}, "5 on ep = 2"),
            (EP2, "exchange", {"variant": "alltoall", "weights_applied": "input"}, "after the experts only"),
            (EP2, "exchange", {"variant": "alltoall", "routing.scale": 2.0}, "does not map routing.scale=2.0"),
            (Layout(2, etp=2), "exchange", {"variant": "alltoall"}, "etp = 2"),
            (TP2_EP2, "trainer", {"variant": "alltoall"}, "adapted for dp and ep alone"),
            (EP2, "trainer", {"variant": "alltoall", "hidden": 36}, "multiple of 8 bfloat16, not 36"),
            (EP2, "experts", {"hidden": 36}, "multiple of 8 bfloat16, not 36"),
            (EP2_EDP2, "experts", {"dtype": torch.float64}, "in float32 what FSDP2 shards"),
            (Layout(4, tp=2), "layer", {"variant": "alltoall"}, "tp = 2 with ep = 1"),
            (Layout(4, tp=2, ep=4), "layer", {"variant": "alltoall", "shared.ffn": (16,)}, "along F by tp and along D"),
            (Layout(4, tp=2, ep=2), "layer", {"variant": "alltoall", "shared.ffn": (8,), "shared.gate": True}, "fla"),
            (Layout(4, tp=2, ep=2), "balancing_routers", {"routing.balance_bias": True}, "by sharding configs"),
            (EP2, "layer", {"variant": "alltoall", "shared.gate": True}, "and there are none"),
            (EP2, "layer", {"variant": "alltoall", "shared.ffn": (8, 16), "shared.bias": True}, "it has one bias"),
            (EP2, "layer", {"variant": "alltoall", "dtype": torch.float64}, "in float32 what FSDP2 shards"),
            (EP2, "router", {"routing.score": "sqrtsoftplus"}, "softmax or sigmoid, not sqrtsoftplus"),
            (EP2, "router", {"routing.groups": (4, 2), "routing.group_score": "max"}, "two best experts, not by max"),
            (EP2, "router", {"routing.forced": (("random", None),)}, "forces round robin, and nothing else"),
        ],
    )
    def test_what_it_cannot_ask_for_is_refused(
        self, layout: Layout, surface: str, fields: dict[str, Any], reason: str
    ) -> None:
        """The adapter says what was asked and refuses in its own name, not in the library's."""
        opened = session(layout)
        with pytest.raises(Unsupported, match=reason) as refusal:
            getattr(opened, surface)(Config().changed(fields))
        assert "adapter" == refusal.value.by
        opened.close()

    def test_empty_slots_are_outside_its_limits(self) -> None:
        """A workload with empty slots is not run: it would leave ranks waiting."""
        dropped = next(w for w in recipes.corpus("alltoall", EP2, "quick") if w.name == "dropped-even")
        limit = features.broken(TorchTitan().limits("alltoall"), dropped, "cpu")
        assert limit is not None
        assert ("dropped_slots", "undefined") == (limit.on, limit.proof)
