"""What the managers of native's flex variants hand to the experts, on ranks; where they are tried; what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_conformance.backends.native import Native
from moe_conformance.backends.native.fused.flex import FlexExchange
from moe_conformance.backends.native.fused.token_exchange import Arrived
from moe_conformance.contract import Config, Delivery, ReceiveBuffer, Routing, Unsupported
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.workloads.plan import Plan
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.selection import profiles
from self_tests.backends.flex_scene import EP2_ETP2, EP4, TOKENS, E, K, Scene, on_ranks, values

FLEX = ("deepep", "hybridep", "ncclep")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("self_tests.backends.test_native_managers",)) as engine:
        yield engine


def deliver(scene: Scene) -> tuple[Delivery, Any, Arrived]:
    """Dispatch through a manager and bare."""
    x_TD, ids_TK, weights_TK = scene.batch()
    flex: FlexExchange = scene.flex(scene.payload)
    delivery, flight = flex.dispatch(x_TD, Routing(ids_TK, weights_TK, E))
    held = getattr(flight, "handle", flight).land()  # inside that of the padding, where there is one
    return delivery, getattr(held, "begin_WN", None), scene.exchange.dispatch(x_TD, ids_TK, weights_TK)


def deliver_what_fits(scene: Scene) -> list[Delivery]:
    """Dispatch with room for all, with room for some, and again."""
    x_TD, ids_TK, weights_TK = scene.batch()
    roomy, tight = (
        scene.flex("hybridep", receive_buffer=ReceiveBuffer(rows=rows, overflow="drop")) for rows in (99, scene.payload)
    )
    routing = Routing(ids_TK, weights_TK, E)
    one = Routing(ids_TK[:1], weights_TK[:1], E)
    return [roomy.dispatch(x_TD, routing)[0], tight.dispatch(x_TD, routing)[0], tight.dispatch(x_TD[:1], one)[0]]


class TestManagers:
    def test_deepep_hands_over_the_rows_as_they_came(self, engine: Engine) -> None:
        """With K slots each."""
        for delivery, _, bare in values(on_ranks(engine, deliver, EP2_ETP2, "deepep")):
            assert torch.equal(bare.rows_RD, delivery.rows_RD)
            assert torch.equal(bare.handle.ids_RK, delivery.ids_RJ)
            assert torch.equal(bare.weights_RK, delivery.weights_RJ)

    def test_hybridep_hands_over_rows_by_expert_in_equal_buffers(self, engine: Engine) -> None:
        """Whatever each rank got; behind the counts there is nothing for any expert."""
        found = [delivery for delivery, *_ in values(on_ranks(engine, deliver, EP2_ETP2, "hybridep"))]
        assert {4 * max(TOKENS) * K} == {len(delivery.rows_RD) for delivery in found}
        for delivery in found:
            filled = int(delivery.counts_N.sum())
            assert sorted(delivery.ids_RJ[:filled, 0].tolist()) == delivery.ids_RJ[:filled, 0].tolist()
            assert {-1} == set(delivery.ids_RJ[filled:, 0].tolist())
        assert len({int(delivery.counts_N.sum()) for delivery in found}) > 1

    @pytest.mark.parametrize("layout", [EP4, EP2_ETP2], ids=lambda layout: layout.name)
    def test_hybridep_leaves_out_what_finds_no_room(self, engine: Engine, layout: Layout) -> None:
        """The last rows of the last experts; the flag is each rank's own, and down again where all rows fit."""
        room = 8
        for all_rows, some_rows, few_rows in values(on_ranks(engine, deliver_what_fits, layout, room)):
            counts_N = all_rows.counts_N.tolist()
            kept = [max(0, min(n, room - sum(counts_N[:i]))) for i, n in enumerate(counts_N)]
            assert kept == some_rows.counts_N.tolist()
            assert room == len(some_rows.rows_RD)
            assert torch.equal(all_rows.rows_RD[:room], some_rows.rows_RD)
            assert torch.equal(all_rows.weights_RJ[:room], some_rows.weights_RJ)
            assert [False, sum(counts_N) > room] == [all_rows.overflowed, some_rows.overflowed]
            assert [False, True] == [few_rows.overflowed, int(few_rows.counts_N.sum()) <= room]

    def test_ncclep_packs_rows_by_source_and_tells_where_runs_begin(self, engine: Engine) -> None:
        """The table is that of the pairs counted one by one."""
        for delivery, begin_WN, bare in values(on_ranks(engine, deliver, EP4, "ncclep")):
            source_R = [s for s, rows in enumerate(bare.handle.received_W) for _ in range(rows)]
            runs = sorted(
                (source, n) for source, ids_K in zip(source_R, bare.handle.ids_RK.tolist(), strict=True)
                for n in ids_K if n >= 0
            )  # fmt: skip
            assert [n for _, n in runs] == delivery.ids_RJ[:, 0].tolist()
            W, N = begin_WN.shape
            assert [[sum(run < (s, n) for run in runs) for n in range(N)] for s in range(W)] == begin_WN.tolist()


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "sentence"),
        [
            (
                Config("deepep", weights_applied="input"),
                "a row has several weights, none can be applied",
            ),
            (Config("ncclep", receive_buffer=ReceiveBuffer(factor=1.0)), "NCCLEPManager has no buffer of fixed size"),
            (
                Config("ncclep", receive_buffer=ReceiveBuffer(rows=3)),
                "NCCLEPManager has no buffer of fixed size: receive_buffer.rows = 3",
            ),
            (
                Config("hybridep", receive_buffer=ReceiveBuffer(factor=2.0, rows=3)),
                "one size: receive_buffer.factor = 2.0 and receive_buffer.rows = 3",
            ),
            (
                Config("ncclep", receive_buffer=ReceiveBuffer(rows=3, overflow="drop")),
                "NCCLEPManager has no buffer of fixed size",
            ),
            (
                Config("hybridep", receive_buffer=ReceiveBuffer(overflow="drop")),
                "receive_buffer.overflow = 'drop' needs receive_buffer.factor or receive_buffer.rows",
            ),
            (Config("hybridep", experts=7), "7 experts do not divide over ep = 4"),
        ],
    )
    def test_what_a_manager_cannot_do_is_refused(self, engine: Engine, config: Config, sentence: str) -> None:
        """By the library, on every rank, before anything is exchanged."""
        for rank in on_ranks(engine, refuse, payload=config):
            assert ("library", ()) == (rank.value[0], rank.ledger)
            assert sentence in rank.value[1]


def refuse(scene: Scene) -> tuple[str, str]:
    """Build an exchange that cannot be; return who refused and how."""
    with pytest.raises(Unsupported) as refusal:
        Native().open(scene.topology, scene.context.device).exchange(scene.payload)
    return refusal.value.by, str(refusal.value)


class TestPlan:
    def test_the_quick_profile_tries_a_sample(self) -> None:
        """All three run on one rank, two, and where experts are spread and cut; in full, no layout is left out."""
        quick = {cell.id for cell in Plan(Native(), "cpu", "quick").cells if cell.variant in FLEX}
        assert {f"{variant}-{layout}" for variant in FLEX for layout in ("single", "ep2", "ep2-etp2")} == quick
        full = [cell for cell in Plan(Native(), "cpu", "full").cells if cell.variant in FLEX]
        assert len(FLEX) * len({*profiles.full_layouts(), *profiles.beside("full")}) == len(full)

    def test_every_kind_of_workload_is_tried_with_some(self) -> None:
        """In the quick profile they share what variants can do but for pairs, and Hypothesis draws for none."""
        plan = Plan(Native(), "cpu", "quick")
        runs = {
            variant: {c.workload.run for c in plan.cases if c.cell.variant == variant} for variant in Native.sampled
        }
        pool = {c.workload.run for c in plan.pool if c.cell.variant in Native.sampled and not c.workload.rotates}
        assert pool == {run for each in runs.values() for run in each}
        assert all({ExchangeStep(), ExpertsStep()} < each for each in runs.values())
        assert not {cell.variant for cell in plan.drawing(ExchangeStep())} & set(FLEX)

    def test_many_virtual_ranks_are_tried(self) -> None:
        """On 8, 64 and 256, as many as of the other variants."""
        virtual = Plan(Native(), "cpu", "virtual", 256).cells
        for variant in FLEX:
            assert {8, 64, 256} == {cell.layout.world for cell in virtual if cell.variant == variant}
            assert {c.layout for c in virtual if c.variant == variant} == {
                c.layout for c in virtual if c.variant == "allgather"
            }


@pytest.mark.parametrize("variant", FLEX)
def test_what_was_built_is_told(engine: Engine, variant: str) -> None:
    """The manager, the token exchange under it and what travels."""
    for told in values(on_ranks(engine, tell, payload=variant)):
        assert {"deepep": "DeepEPManager", "hybridep": "HybridEPManager", "ncclep": "NCCLEPManager"}[variant] == told[
            "manager"
        ]
        assert ("TokenExchange", "tokens", "expert") == (told["token_exchange"], told["sends"], told["weights"])


def tell(scene: Scene) -> dict[str, str]:
    """What the built exchange says of itself."""
    exchange = scene.flex(scene.payload)
    return {**exchange.resolved, "sends": exchange.claims.wire}
