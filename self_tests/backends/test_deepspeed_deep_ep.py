"""AutoEP over a stand-in for DeepEP 2, held against the oracles by itself: no judge of the suite takes part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_conformance.backends.deepspeed.deep_ep import DeepSpeedDeepEP
from moe_conformance.contract import Config, Routing
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.stand_ins import NOTE
from moe_conformance.workloads import layers, recipes
from moe_conformance.workloads.records.workload import Workload
from self_tests.backends.asking import prepared, refusals
from self_tests.backends.dense import assert_equal_to_the_bit, assert_layer_alike

pytest.importorskip("deepspeed")

NAME = "moe_conformance.backends.deepspeed.deep_ep:DeepSpeedDeepEP"
EP2, EP2_EDP2 = Layout(2, ep=2), Layout(4, ep=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks that have imported DeepSpeed already."""
    with prepared(DeepSpeedDeepEP) as engine:
        yield engine


def run(engine: Engine, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish; a version without the transport is skipped."""
    outcome = moe_step(engine, NAME, workload)
    if all(rank.status == "refused" and "no transport" in str(rank.error) for rank in outcome.ranks):
        pytest.skip(str(outcome.ranks[0].error))
    assert ["ok"] * workload.layout.world == [rank.status for rank in outcome.ranks], [r.error for r in outcome.ranks]
    return outcome


def bare(context: RankContext, layout: Layout) -> str:
    """On a rank: what a step in float32 says if the library's own check of dtypes is left as it is."""
    session = DeepSpeedDeepEP().open(Topology(layout, context.rank, context.groups), context.device)
    from deepspeed.module_inject import auto_ep_comm

    exchange = session.exchange(Config("deepep"))
    own, auto_ep_comm.SUPPORTED_DTYPES = auto_ep_comm.SUPPORTED_DTYPES, (torch.bfloat16,)
    routing = Routing(torch.tensor([[0, 1]]), torch.ones(1, 2), Config.experts)
    try:
        exchange(torch.ones(1, Config.hidden), routing, lambda delivery: delivery.rows_RD)  # type: ignore[operator]
    except TypeError as error:
        return str(error)
    finally:
        auto_ep_comm.SUPPORTED_DTYPES = own
        session.close()
    return "nothing"


class TestExchange:
    @pytest.mark.parametrize("layout", [EP2, EP2_EDP2], ids=lambda layout: layout.name)
    @pytest.mark.parametrize(
        "name",
        ["uneven", "rank-without-tokens", "idle-rank-even", "in-flight-uneven", "top-all-even", "uneven-bfloat16"],
    )
    def test_it_computes_the_layer(self, engine: Engine, layout: Layout, name: str) -> None:
        """Output and gradients equal the dense formulation to the bit, and the kernel is said to be a stand-in."""
        workload = next(w for w in recipes.corpus("deepep", layout, "full") if w.name == name)
        outcome = run(engine, workload)
        assert_equal_to_the_bit(outcome)
        assert NOTE in outcome.ranks[0].resolved["deep_ep"]
        assert "deepep" == outcome.ranks[0].resolved["transport"]

    def test_the_library_takes_bfloat16_alone(self, engine: Engine) -> None:
        """The adapter widens the library's list for the stand-in, which takes other types, unlike the kernels."""
        result = engine.run(Job(f"{__name__}:bare", EP2, 2, EP2.groups(), deadline_s=30.0))
        assert ["ok", "ok"] == [rank.status for rank in result.ranks], [rank.error for rank in result.ranks]
        for rank in result.ranks:
            assert "handles bfloat16 only" in rank.value


class TestLayer:
    @pytest.mark.parametrize("name", ["layer-even", "shared-even"])
    def test_it_computes_the_layer(self, engine: Engine, name: str) -> None:
        """Outputs and gradients: those of the router come through weights that travelled with the rows."""
        workload = next(w for w in layers.layers("deepep", EP2_EDP2, "full") if w.name == name)
        assert_layer_alike(run(engine, workload), divisor=EP2_EDP2.dp, allowed=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "reason"),
        [(Layout(1), "with ep = 1 AutoEP sends nothing"), (Layout(4, ep=2, tp=2), "folds tensor parallelism")],
        ids=["single", "tp2"],
    )
    def test_layouts_without_the_transport_are_refused(self, engine: Engine, layout: Layout, reason: str) -> None:
        """Every rank refuses, in the adapter's name."""
        for who, why in refusals(engine, NAME, "deepep", layout, "exchange", {}):
            assert "adapter" == who
            assert reason in why
