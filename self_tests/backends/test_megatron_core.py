"""The adapter to Megatron-Core, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moe_conformance.backends.megatron_core import MegatronCore
from moe_conformance.contract import Unsupported
from moe_conformance.contract.topology import Layout, Topology, layouts
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads import recipes, routers
from moe_conformance.workloads.records import features
from moe_conformance.workloads.records.workload import Workload
from self_tests.backends.asking import prepared
from self_tests.backends.dense import assert_equal_to_the_bit, assert_routed_alike, oracle, seen, worst

try:
    MegatronCore().versions()  # importing the library here would take seconds: only the ranks need it
except Unsupported as missing:
    pytest.skip(str(missing), allow_module_level=True)

NAME = "moe_conformance.backends.megatron_core:MegatronCore"
EP2, TP2_EP2 = Layout(2, ep=2), Layout(2, tp=2, ep=2)
REPLICATED, FOLDED = Layout(4, ep=2), Layout(4, tp=2, ep=2, etp=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported Megatron-Core already."""
    with prepared(MegatronCore) as engine:
        yield engine


def pinned(variant: str, layout: Layout, name: str, /, **config: Any) -> Workload:
    """The pinned workload of that name, with fields of its config changed."""
    found = next(w for w in recipes.corpus(variant, layout, "full") if w.name == name)
    return replace(found, config=found.config.changed(config))


def routed(layout: Layout, name: str) -> Workload:
    """The pinned workload of the router of that name."""
    return next(w for w in routers.routing_corpus("alltoall", layout) if w.name == name)


def run(engine: Engine, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish."""
    outcome = moe_step(engine, NAME, workload)
    assert ["ok"] * workload.layout.world == [rank.status for rank in outcome.ranks], [r.error for r in outcome.ranks]
    return outcome


def on_a_rank(engine: Engine, function: str, given: Any = None) -> Any:
    """What a function of this file returns on a rank, where the library is imported already."""
    (rank,) = engine.run(Job(f"{__name__}:{function}", given, 1, {}, deadline_s=30.0)).ranks
    assert rank.status == "ok", rank.error
    return rank.value


def what_stands_where(context: RankContext, _: None) -> list[str]:
    """On a rank: the library's device, and the modules that torch's own functions come from."""
    from moe_conformance.backends.megatron_core import library

    assert library.SHIMS
    device = library.moe_utils.torch.cuda.current_device()
    own = torch.cuda.current_device.__module__, dist.all_gather.__module__.rpartition(".")[0]
    return [str(device), *own]


def layouts_with_other_groups(context: RankContext, _: None) -> list[str]:
    """On a rank: the layouts for which the library would build other groups than we do."""
    every = [each for world in (1, 2, 4, 6, 8, 12) for each in layouts(world)]
    assert len(every) > 500
    return [each.name for each in every if MegatronCore().groups(each.sizes()) != each.groups()]


def replicas_in_a_wrong_library(context: RankContext, layout: Layout) -> Any:
    """On a rank: the replicas of an expert if the library made their groups from the axes of the dense parameters."""
    from moe_conformance.backends.megatron_core.library import parallel_state

    right = inspect.getsource(parallel_state.initialize_model_parallel)
    # Quotes differ by version.
    wrong = re.sub(r"expert_(decoder_rank_generator\.get_ranks\(['\"]dp['\"]\))", r"\1", right)
    assert right != wrong
    made: dict[str, Any] = {}
    exec(wrong, vars(parallel_state), made)
    with patch.object(parallel_state, "initialize_model_parallel", made["initialize_model_parallel"]):
        return MegatronCore().groups(layout.sizes())["edp"]


class TestModule:
    def test_importing_the_adapter_does_not_import_the_library(self) -> None:
        """A driver that only lists backends stays light."""
        code = "import sys, moe_conformance.backends.megatron_core; sys.exit('megatron.core' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode

    def test_versions_name_the_library(self) -> None:
        """Verdicts can be told apart by the version that they are about."""
        assert {"megatron-core", "torch"} == set(MegatronCore().versions())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the shims are for machines without CUDA")
    def test_shims_stay_inside_the_library(self, engine: Engine) -> None:
        """What the library sees as torch.cuda and torch.distributed is replaced; torch's own are not."""
        assert ["cpu", "torch.cuda", "torch.distributed"] == on_a_rank(engine, "what_stands_where")

    def test_groups_are_those_of_the_layout(self, engine: Engine) -> None:
        """The library makes the groups that we make on every layout of up to 12 ranks, in order too."""
        assert [] == on_a_rank(engine, "layouts_with_other_groups")

    def test_groups_are_those_that_the_library_makes(self, engine: Engine) -> None:
        """A library that confuses two axes is not mended: each of four ranks holds experts of its own here."""
        assert ((0, 2), (1, 3)) == on_a_rank(engine, "replicas_in_a_wrong_library", Layout(4, tp=2, ep=4))


EVEN = ["even", "top-all-even", "odd-experts-even", "one-expert-even", "idle-rank-even", "dropped-even"]
EVEN += ["two-dims-even", "in-flight-even", "halves-in-flight-even", "even-bfloat16", "even-float64"]
UNEVEN = ["uneven", "rank-without-tokens", "dropped-uneven", "one-by-one-uneven", "in-flight-uneven", "uneven-bfloat16"]
UNEVEN += ["halves-in-flight-uneven"]


class TestExchange:
    @pytest.mark.parametrize(
        ("variant", "name"),
        [("alltoall", name) for name in EVEN + UNEVEN]
        # With several microbatches the all-gather dispatcher's dx is overwritten, a fault of the library.
        + [("allgather", name) for name in EVEN if "in-flight" not in name],
    )
    def test_it_computes_the_layer(self, engine: Engine, variant: str, name: str) -> None:
        """Output and gradients of the suite's expert equal the dense formulation to the bit."""
        outcome = run(engine, pinned(variant, EP2, name))
        assert_equal_to_the_bit(outcome)

    @pytest.mark.parametrize("variant", MegatronCore.variants)
    def test_it_says_what_it_built(self, engine: Engine, variant: str) -> None:
        """The class of the dispatcher, the sizes of its groups and the shims are on record."""
        resolved = run(engine, pinned(variant, FOLDED, "even")).ranks[0].resolved
        classes = {"allgather": "MoEAllGatherTokenDispatcher", "alltoall": "MoEAlltoAllTokenDispatcher"}
        assert (classes[variant], "2", "2") == (resolved["dispatcher"], resolved["ep ranks"], resolved["etp ranks"])
        assert ("torch.cuda" in resolved["shims"]) == (not torch.cuda.is_available())


class TestExperts:
    @pytest.mark.parametrize("layout", [EP2, TP2_EP2, REPLICATED, FOLDED], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        ("variant", "name", "allowed"),
        [
            ("allgather", "own-even-float64", 1e-14),
            ("alltoall", "own-uneven-float64", 1e-14),
            ("alltoall", "own-rank-without-tokens", 1e-6),
            ("alltoall", "own-in-flight-uneven", 1e-6),
            ("alltoall", "own-uneven-bfloat16", 0.02),
        ],
    )
    def test_gradients_are_averaged_over_dp(
        self, engine: Engine, layout: Layout, variant: str, name: str, allowed: float
    ) -> None:
        """After finishing, every holder of a part of an expert has the sum over all ranks' tokens / dp."""
        outcome = run(engine, pinned(variant, layout, name))
        expected = oracle(outcome.workload)
        for actual, wanted in zip(seen(outcome), (expected.y_TD, expected.dx_TD, expected.dweights_TK), strict=True):
            assert worst(actual, wanted) < 2 * allowed
        largest = max(float(value.abs().max()) for value in expected.parameters.values())
        compared = 0
        for rank in outcome.ranks:
            assert () == rank.uncovered
            assert rank.grads_final is not None
            for key, grad in rank.grads_final.items():
                assert grad.value is not None
                wanted = shard_of(expected.parameters[key], grad.shard)
                assert float((grad.value.double() * layout.dp - wanted).abs().max()) / largest < allowed
                compared += grad.value.numel()
        assert layout.edp * sum(value.numel() for value in expected.parameters.values()) == compared

    def test_half_precision_is_accumulated_in_float32(self, engine: Engine) -> None:
        """As Megatron-LM's trainer has it by default."""
        resolved = run(engine, pinned("alltoall", EP2, "own-even-bfloat16")).ranks[0].resolved
        assert ("torch.bfloat16", "torch.float32") == (resolved["parameters"], resolved["gradients"])

    def test_extra_is_passed_on(self, engine: Engine) -> None:
        """The activation that Megatron-LM's trainer chooses by default can be asked for, and is what is built."""
        workload = pinned("alltoall", EP2, "own-uneven", extra=(("bias_activation_fusion", True),))
        outcome = run(engine, workload)
        assert "fused" == outcome.ranks[0].resolved["activation"]
        assert worst(seen(outcome)[0], oracle(workload).y_TD) < 1e-6


class TestRouter:
    @pytest.mark.parametrize(
        "name",
        [
            "route-softmax",
            "route-softmax-normalised",
            "route-softmax-topk-scaled",
            "route-sigmoid-biased-normalised-scaled",
            "route-groups-top2",
            "route-groups-topk-softmax",
            "route-top-1",
            "route-odd-experts",
        ],
    )
    def test_it_chooses_and_weighs_as_the_oracle(self, engine: Engine, name: str) -> None:
        """The same experts, the same weights, the true load, and the gradient of all ranks' tokens / dp."""
        workload = routed(TP2_EP2, name)
        outcome, config = run(engine, workload), workload.config
        router = workload.parameters["router", None].double().requires_grad_()
        routes = assert_routed_alike(outcome, 1e-6, router)
        for rank, batch, expected in zip(outcome.ranks, workload.batches[0], routes, strict=True):
            expected.weights_TK.backward(batch.upstream.double().gather(1, expected.ids_TK))
            if config.routing.balance_bias:
                counts_E = rank.microbatches[0].router.counts_E
                assert counts_E is not None
                assert torch.equal(torch.bincount(expected.ids_TK.flatten(), minlength=config.experts), counts_E.long())
        assert router.grad is not None
        for rank in outcome.ranks:
            assert rank.grads_final is not None
            final = rank.grads_final["router", None].value
            assert final is not None
            assert worst(final * workload.layout.dp, router.grad) < 1e-6

    @pytest.mark.parametrize("name", ["route-sqrtsoftplus-biased-normalised", "route-gate-bias-sigmoid"])
    def test_what_newer_versions_have(self, engine: Engine, name: str) -> None:
        """Scores by sqrtsoftplus, since 0.19, and a bias of the gate, which the switch of all biases gives."""
        from moe_conformance.backends.megatron_core.differences import has_score

        workload = routed(Layout(1), name)
        if workload.config.routing.score == "sqrtsoftplus" and not has_score("sqrtsoftplus"):
            pytest.skip("this version scores by softmax or sigmoid")
        outcome = run(engine, workload)
        if not workload.config.gate_bias:  # of which the formulation here knows nothing
            assert_routed_alike(outcome, 1e-6)
        assert workload.config.gate_bias == (("gate_bias", None) in outcome.ranks[0].grads_local)

    def test_it_says_in_what_it_was_seen_to_compute(self, engine: Engine) -> None:
        """Weights in float64 that are all float32 numbers: MC-03."""
        outcome = run(engine, routed(EP2, "route-float64"))
        assert [torch.float32] * 2 == [rank.claims.dtype for rank in outcome.ranks]


def refused(engine: Engine, workload: Workload) -> tuple[str | None, str]:
    """Who refused the workload, and why."""
    refusal = moe_step(engine, NAME, workload).refusal
    assert refusal is not None
    assert refusal.error is not None
    return refusal.error_by, refusal.error


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"variant": "flex"}, "the dispatcher 'flex' is not adapted"),
            ({"weights_applied": "output"}, "does not map weights_applied='output'"),
            ({"extra": (("no_such_field", 1),)}, "no field no_such_field"),
        ],
    )
    def test_an_exchange_that_it_cannot_ask_for(self, engine: Engine, fields: dict[str, Any], reason: str) -> None:
        """The adapter says what was asked and refuses in its own name, not in the library's."""
        by, said = refused(engine, pinned("alltoall", EP2, "even", **fields))
        assert ("adapter", True) == (by, reason in said), said

    def test_the_same_tokens_on_ranks_of_tp_are_the_librarys_to_refuse(self, engine: Engine) -> None:
        """A layer without sequence parallelism refuses to train, before any collective."""
        by, said = refused(engine, pinned("alltoall", TP2_EP2, "even", token_copies=True))
        assert ("library", True) == (by, "without also enabling sequence parallelism" in said)

    def test_a_receive_buffer_is_of_other_dispatchers(self, engine: Engine) -> None:
        """Since 0.19 the library has a field for it, and refuses it here; rows it has in no version."""
        by, said = refused(engine, pinned("alltoall", EP2, "even", **{"receive_buffer.factor": 1.5}))
        assert "moe_expert_rank_capacity_factor" in said
        assert by == ("library" if "requires" in said else "adapter")
        by, said = refused(engine, pinned("alltoall", EP2, "even", **{"receive_buffer.rows": 12}))
        assert ("adapter", True) == (by, "rows=12" in said)

    def test_experts_that_ep_does_not_divide_are_the_librarys_to_refuse(self, engine: Engine) -> None:
        """It does so by an assertion without words (MC-31), which the adapter does not make up for."""
        by, said = refused(engine, pinned("alltoall", EP2, "even", experts=5))
        assert ("library", False) == (by, "5" in said)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("route-sqrtsoftplus", "if and only if K > 1"),
            ("route-sigmoid", "if and only if K > 1"),
            ("route-top-1-normalised", "if and only if K > 1"),
            ("route-groups-max", "not by max"),
        ],
    )
    def test_a_router_that_it_cannot_ask_for(self, engine: Engine, name: str, reason: str) -> None:
        """Scores, normalisations and group scores that the library lacks are refused, not replaced."""
        by, said = refused(engine, routed(EP2, name))
        assert ("adapter", True) == (by, reason in said), said

    @pytest.mark.parametrize("forced", [(("round_robin", None),), (("biased", 0.5), ("biased", 0.25))])
    def test_a_strategy_that_it_cannot_ask_for(self, engine: Engine, forced: Any) -> None:
        """The library forces no ids, and has one deviation of a bias; before 0.19 it has none."""
        workload = routed(EP2, "route-softmax")
        by, said = refused(engine, replace(workload, config=workload.config.changed({"routing.forced": forced})))
        assert "adapter" == by
        assert any(words in said for words in (f"of the kind '{forced[0][0]}'", "is one deviation")), said

    @pytest.mark.parametrize(
        ("name", "fields", "reason"),
        [
            ("route-top-1", {"routing.score": "softmax_topk"}, "pre-softmax when topk is 1"),
            ("route-softmax", {"routing.balance_bias": True}, "Expert bias for aux-loss-free routing only supports"),
            ("route-groups-top2", {"experts": 6}, "should be divisible by"),
        ],
    )
    def test_what_the_library_refuses(self, engine: Engine, name: str, fields: dict[str, Any], reason: str) -> None:
        """A refusal of TransformerConfig is the library's."""
        workload = routed(EP2, name)
        by, said = refused(engine, replace(workload, config=workload.config.changed(fields)))
        assert ("library", True) == (by, reason in said), said

    def test_a_message_that_only_sounds_like_a_refusal_is_none(self, engine: Engine) -> None:
        """What else TransformerConfig raises is judged, also where it speaks of experts or has "fus" in a word."""
        extra = (("fine_grained_activation_offloading", True), ("offload_modules", ("confused",)))
        workload = pinned("alltoall", EP2, "even", extra=extra)
        assert {"raised"} == {rank.status for rank in moe_step(engine, NAME, workload).ranks}

    @pytest.mark.parametrize(
        ("layout", "reason"), [(EP2, "not supported in the shared experts"), (FOLDED, "only supported when ETP==1")]
    )
    def test_biases_of_shared_experts_are_the_librarys_to_refuse(
        self, engine: Engine, layout: Layout, reason: str
    ) -> None:
        """Of its one switch for biases shared experts want nothing, and experts over etp neither."""
        by, said = refused(
            engine, next(w for w in shared_experts.layers("alltoall", layout, "quick") if w.config.shared.bias)
        )
        assert ("library", True) == (by, reason in said), said

    def test_uneven_tokens_are_outside_the_limits_of_allgather(self) -> None:
        """They would hang or kill ranks, so they are not run; all-to-all takes them."""
        uneven = {variant: pinned(variant, EP2, "uneven") for variant in MegatronCore.variants}
        limits = {v: features.broken(MegatronCore().limits(v), w, "cpu") for v, w in uneven.items()}
        assert limits["alltoall"] is None
        assert limits["allgather"] is not None
        assert ("uneven_tokens", "undefined") == (limits["allgather"].on, limits["allgather"].proof)


def groups_of_a_session(context: RankContext, layout: Layout) -> tuple[int, int, int]:
    """On a rank: open and close a session; return how many process groups there are before, during and after."""
    known = dist.distributed_c10d._world.pg_map
    before = len(known)
    session = MegatronCore().open(Topology(layout, context.rank, context.groups), context.device)
    during = len(known)
    session.close()
    return before, during, len(known)


class TestSession:
    def test_it_leaves_no_process_group_behind(self, engine: Engine) -> None:
        """The library forgets its groups without destroying them; closing a session destroys them."""
        layout = Layout(3, ep=3)  # a world that no other test here uses: one session may be open in a process
        function = f"{__name__}:groups_of_a_session"
        result = engine.run(Job(function, layout, layout.world, layout.groups(), deadline_s=30.0))
        for rank in result.ranks:
            assert rank.status == "ok", rank.error
            before, during, after = rank.value
            assert before < during
            assert before == after

    def test_layouts_take_turns_in_one_process(self, engine: Engine) -> None:
        """Another layout gets other groups, and the first one its own again."""
        for layout in (EP2, TP2_EP2, Layout(2, tp=2, etp=2), EP2):
            outcome = run(engine, pinned("alltoall", layout, "own-uneven"))
            assert worst(seen(outcome)[0], oracle(outcome.workload).y_TD) < 1e-6
