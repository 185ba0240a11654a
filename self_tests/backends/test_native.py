"""The native backend where no check of the suite looks: order, rounding, refusals; and its liars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.row_ops.permutation import permute, sort_pairs, unpermute, weigh
from moe_conformance.chapters.capacity.workloads import padded_experts
from moe_conformance.contract import Capacity, Config, Routing, RoutingOptions, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads import recipes
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Workload
from self_tests.lying_backends import lying

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("moe_conformance.scenarios.moe_step", "self_tests.lying_backends.lying")) as engine:
        yield engine


def run(engine: Engine, backend: type[Native], workload: Workload) -> Outcome:
    """Run a workload through a backend given by its class."""
    return moe_step(engine, f"{backend.__module__}:{backend.__name__}", workload)


def workload_like(name: str, layout: Layout, **config: Any) -> Workload:
    """The pinned workload of that name, with fields of its config changed."""
    found = next(w for w in recipes.corpus("alltoall", layout, "full") if w.name == name)
    return replace(found, config=found.config.changed(config))


def session(layout: Layout, rank: int = 0) -> NativeSession:
    """A session that may build what starts no collective: it has no process groups."""
    return Native().open(Topology(layout, rank, {}), CPU)


class TestPermutation:
    def test_pairs_are_sorted_by_expert_then_token_then_slot(self) -> None:
        """Empty slots vanish, and an expert twice in a row is two pairs."""
        pairs = sort_pairs(torch.tensor([[2, -1, 0], [0, 2, 2], [-1, -1, -1]]), experts=4)
        assert [(0, 2), (1, 0), (0, 0), (1, 1), (1, 2)] == list(
            zip(pairs.token_P.tolist(), pairs.slot_P.tolist(), strict=True)
        )
        assert [2, 0, 3, 0] == pairs.counts_E.tolist()

    def test_an_expert_that_does_not_exist_is_an_error(self) -> None:
        """It says which id there is no expert for."""
        with pytest.raises(ValueError, match="expert id 4 among 4 experts"):
            sort_pairs(torch.tensor([[4]]), experts=4)

    def test_missing_tokens_are_an_error(self) -> None:
        """One token is not spread over the ids of three."""
        pairs = sort_pairs(torch.tensor([[0], [1], [0]]), experts=2)
        with pytest.raises(ValueError, match="1 tokens, but ids for 3"):
            permute(torch.ones(1, 4), pairs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_over_slots_are_rounded_once(self, dtype: torch.dtype) -> None:
        """Forward and backward agree to the bit with a float64 sum that is cast at the end."""
        draw = torch.Generator().manual_seed(5)
        pairs = sort_pairs(torch.randint(-1, 6, (7, 8), generator=draw), experts=6)
        rows_PD = torch.randn(len(pairs.token_P), 16, generator=draw).to(dtype)
        exact_TD = torch.zeros(7, 16, dtype=torch.float64).index_add(0, pairs.token_P, rows_PD.double())
        assert torch.equal(exact_TD.to(dtype), unpermute(rows_PD, pairs))
        x_TD = torch.randn(7, 16, generator=draw).to(dtype).requires_grad_()
        permute(x_TD, pairs).backward(rows_PD)
        assert torch.equal(exact_TD.to(dtype), x_TD.grad)

    def test_a_weight_of_a_wider_dtype_is_not_rounded_first(self) -> None:
        """The product of a bf16 row and a float32 weight is taken in float32 and rounded once."""
        row, weight = torch.tensor([[1.5]], dtype=torch.bfloat16), torch.tensor([1.0059])
        weighed = weigh(row, weight)
        assert (row.double() * weight.double()).to(torch.bfloat16) == weighed
        assert row * weight.to(torch.bfloat16) != weighed


class TestRefusals:
    @pytest.mark.parametrize(
        ("layout", "config", "sentence"),
        [
            (Layout(2, ep=2), Config("local"), "2 ranks of ep \\* etp"),
            (Layout(2, etp=2), Config("local"), "2 ranks of ep \\* etp"),
            (Layout(4, ep=4), Config("alltoall", experts=6), "6 experts do not divide over ep = 4"),
        ],
    )
    def test_an_exchange_that_cannot_be_is_refused(self, layout: Layout, config: Config, sentence: str) -> None:
        """The refusal is the library's own, and names the numbers."""
        with pytest.raises(Unsupported, match=sentence) as refusal:
            session(layout).exchange(config)
        assert "library" == refusal.value.by

    def test_experts_that_cannot_be_cut_are_refused(self) -> None:
        """F must divide over etp."""
        with pytest.raises(Unsupported, match="ffn = 15 does not divide over etp = 2") as refusal:
            session(Layout(2, etp=2)).experts(Config(ffn=15))
        assert "library" == refusal.value.by

    @pytest.mark.parametrize(
        ("fields", "sentence"),
        [
            ({"top_k": 9}, "top_k = 9 of 8 experts"),
            ({"routing.groups": (3, 1)}, "8 experts do not divide into 3 groups"),
            ({"routing.groups": (4, 5)}, "5 groups selected of 4"),
            ({"routing.groups": (4, 1), "top_k": 3}, "top_k = 3 from 1 groups of 2 experts"),
            ({"routing.groups": (8, 2)}, "top2_sum adds up 2 scores of a group of 1"),
            ({"routing.groups": (4, 2), "top_k": 1, "routing.group_score": "topk_sum"}, "topk_sum adds up 0 scores"),
            (
                {"routing.forced": (("random", None), ("round_robin", None))},
                "one strategy .* not random .* and round_robin",
            ),
            (
                {"routing.forced": (("biased", 0.5), ("biased", 0.25))},
                r"one strategy .* biased \(0.5\) and biased \(0.25\)",
            ),
            ({"routing.forced": (("ratio", 0.5),)}, "the hot rank cannot get 0.5 times the load of each other rank"),
            ({"routing.forced": (("biased", None),)}, "the strategy biased needs a parameter; there is none"),
        ],
    )
    def test_a_selection_that_cannot_be_made_is_refused(self, fields: dict[str, Any], sentence: str) -> None:
        """K experts must be there, in groups that their score can be made of."""
        with pytest.raises(Unsupported, match=sentence) as refusal:
            session(Layout(1)).router(Config().changed(fields))
        assert "library" == refusal.value.by

    @pytest.mark.parametrize("fields", [{"weights_applied": "input"}, {"capacity.padded": True}])
    def test_fixed_places_take_neither_weights_nor_a_capacity(self, fields: dict[str, Any]) -> None:
        """Weights come with combine, after the experts; places are never padded to a capacity."""
        with pytest.raises(Unsupported, match=r"'input' and capacity\.padded are not supported") as refusal:
            session(Layout(1)).places_exchange(Config("lowlatency").changed(fields))
        assert "library" == refusal.value.by

    def test_tokens_of_all_tp_ranks_are_not_padded_to_their_capacity(self) -> None:
        """A share may have more rows of an expert than its number of tokens gives room."""
        config = Config("alltoall", token_copies=True, capacity=Capacity(padded=True, factor=1.0))
        with pytest.raises(Unsupported, match="the capacity of all tokens is not that of a tp rank's share"):
            session(Layout(2, tp=2)).exchange(config)

    def test_what_was_not_dropped_before_has_no_room(self) -> None:
        """Experts that are padded to a capacity take no slot beyond it."""
        exchange = session(Layout(1)).exchange(Config("local", top_k=1, capacity=Capacity(padded=True, factor=1.0)))
        slots = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), 8)
        with pytest.raises(ValueError, match="4 slots for expert 0, whose capacity is 1"):
            exchange.dispatch(torch.zeros(4, 32), slots)  # type: ignore[union-attr]

    def test_tokens_of_another_dtype_are_refused(self) -> None:
        """Their bytes would be read as other numbers where they arrive."""
        routing = Routing(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), 8)
        with pytest.raises(ValueError, match=r"instead of 32 in torch\.float32"):
            session(Layout(1)).exchange(Config("local")).dispatch(torch.zeros(1, 32, dtype=torch.float64), routing)  # type: ignore[union-attr]

    def test_a_field_of_another_backend_is_not_adapted(self) -> None:
        """Native has no knobs of its own, and says so."""
        with pytest.raises(Unsupported, match="extra") as refusal:
            session(Layout(1)).exchange(Config("local", extra=(("capacity_factor", 1.5),)))
        assert "adapter" == refusal.value.by


class TestRouter:
    def routed(self, x_TD: Tensor, **fields: Any) -> tuple[Tensor, Tensor]:
        """Route x by an identity router: the logits are x."""
        router = session(Layout(1)).router(Config(experts=x_TD.shape[1], hidden=x_TD.shape[1]).changed(fields))
        next(iter(router.named(lambda p: p.detach()))).view.copy_(torch.eye(x_TD.shape[1]))
        routing = router(x_TD).routing
        return routing.ids_TK, routing.weights_TK

    def test_a_token_that_likes_no_expert_gets_weights_of_zero(self) -> None:
        """Sigmoid underflows at -200 in float32, and 0 / 0 must not become NaN in either direction."""
        x_TD = torch.full((1, 4), -200.0, requires_grad=True)
        _, weights_TK = self.routed(x_TD, routing=RoutingOptions(score="sigmoid", normalise=True))
        weights_TK.sum().backward()
        assert [[0.0, 0.0]] == weights_TK.tolist()
        assert [[0.0] * 4] == x_TD.grad.tolist()

    def test_the_slope_of_an_underflowing_root_is_zero(self) -> None:
        """Where log(1 + exp(l)) is 0 in float32 the gradient is 0, not NaN."""
        x_TD = torch.tensor([[-200.0, -150.0, 1.0]], requires_grad=True)
        _, weights_TK = self.routed(x_TD, routing=RoutingOptions(score="sqrtsoftplus"), top_k=3)
        weights_TK.sum().backward()
        assert [0.0, 0.0] == x_TD.grad[0, :2].tolist()
        assert x_TD.grad[0, 2] > 0.1


class TestOrder:
    @pytest.mark.parametrize("variant", ["alltoall", "allgather"])
    @pytest.mark.parametrize(
        "layout", [Layout(4, ep=4), Layout(4, ep=2, etp=2), Layout(4, etp=4)], ids=lambda layout: layout.name
    )
    def test_rows_of_an_expert_lie_by_source_rank_then_token(
        self, engine: Engine, layout: Layout, variant: str
    ) -> None:
        """The tags of what reaches every expert ascend, and every rank has its rows expert by expert."""
        outcome = run(engine, Native, workload_like("uneven", layout, variant=variant))
        for rank in outcome.ranks:
            (handed,) = rank.microbatches[0].exchange.handed
            tag = tags.decode(handed.rows_RD)
            places = list(zip(handed.ids_RJ[:, 0].tolist(), tag.rank_R.tolist(), tag.token_R.tolist(), strict=True))
            assert len(places) > 10
            assert sorted(places) == places


def finish_without_one_backward(context: RankContext, payload: Any) -> list[float]:
    """Give gradients to the experts of rank 1 alone, finish, and return the values that are there then."""
    opened = Native().open(Topology(Layout(context.world), context.rank, context.groups), context.device)
    experts = opened.experts(Config(experts=2, hidden=4, ffn=2))
    if context.rank == 1:
        for parameter in experts.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
    opened.finish_gradients(experts)
    return sorted({value for parameter in experts.parameters() for value in parameter.grad.flatten().tolist()})


class TestGradients:
    def test_a_replica_without_gradients_takes_part(self, engine: Engine) -> None:
        """Absent counts as zeros, and all replicas end with the same sum."""
        groups = Layout(2).groups()
        job = Job("self_tests.backends.test_native:finish_without_one_backward", None, 2, groups, deadline_s=30.0)
        assert [[3.0], [3.0]] == [rank.value for rank in engine.run(job).ranks]

    def test_what_native_did_not_build_is_an_error(self) -> None:
        """Nothing is left out in silence."""
        with pytest.raises(TypeError, match="this was Linear"):
            session(Layout(1)).finish_gradients(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


class TestTwoMicrobatches:
    def test_state_is_in_the_handle(self) -> None:
        """An exchange used for two routings at once gives each its own."""
        exchange = session(Layout(1)).exchange(Config("local", experts=3, hidden=2))
        x_TD, weights_TK = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
        first = exchange.dispatch(x_TD, Routing(torch.tensor([[2], [0]]), weights_TK, 3))  # type: ignore[union-attr]
        second = exchange.dispatch(-x_TD, Routing(torch.tensor([[0], [-1]]), weights_TK, 3))  # type: ignore[union-attr]
        assert [[1.0, 2.0], [6.0, 8.0]] == exchange.combine(first[0].rows_RD, first[1]).tolist()  # type: ignore[union-attr]
        assert [[-1.0, -2.0], [0.0, 0.0]] == exchange.combine(second[0].rows_RD, second[1]).tolist()  # type: ignore[union-attr]


PAIR = Layout(2, ep=2)


class TestLiars:
    """Each lying backend reports its one wrong value, where an outcome shows it; the judges detect them elsewhere."""

    def test_native_tells_none_of_the_lies(self, engine: Engine) -> None:
        """So whatever the tests below find comes from the liar."""
        for name in ("uneven", "own-uneven"):
            workload = workload_like(name, PAIR)
            for rank in run(engine, Native, workload).ranks:
                microbatch = rank.microbatches[0]
                assert ("ok", "combine", True) == (rank.status, rank.weights_at, rank.partial)
                assert ((), ()) == (rank.uncovered, microbatch.inputs_changed)
                assert workload.config.dtype == microbatch.y_dtype
                for handed in microbatch.exchange.handed:
                    assert torch.equal(torch.bincount(handed.ids_RJ[:, 0], minlength=4), handed.counts_N)

    def test_wrong_counts(self, engine: Engine) -> None:
        """The claim is one row too high, the rows are in order."""
        for rank in run(engine, lying.WrongCounts, workload_like("uneven", PAIR)).ranks:
            (handed,) = rank.microbatches[0].exchange.handed
            assert torch.equal(torch.bincount(handed.ids_RJ[:, 0], minlength=4) + 1, handed.counts_N)

    def test_wrong_place(self, engine: Engine) -> None:
        """The experts are said to get weights and get none."""
        for rank in run(engine, lying.WrongPlace, workload_like("uneven", PAIR)).ranks:
            assert ("expert", None) == (rank.weights_at, rank.microbatches[0].exchange.handed[0].weights_RJ)

    def test_hides_parts(self, engine: Engine) -> None:
        """Two shards that answer in full make y twice what it is."""
        sharded = workload_like("even", Layout(2, etp=2))
        for correct, liar in zip(
            run(engine, Native, sharded).ranks, run(engine, lying.HidesParts, sharded).ranks, strict=True
        ):
            assert not liar.partial
            assert torch.equal(2 * correct.microbatches[0].y, liar.microbatches[0].y)

    def test_changes_inputs(self, engine: Engine) -> None:
        """After the step x holds something else."""
        for rank in run(engine, lying.ChangesInputs, workload_like("uneven", PAIR)).ranks:
            assert ("x",) == rank.microbatches[0].inputs_changed

    @pytest.mark.parametrize(("name", "told"), [("uneven-bfloat16", torch.float64), ("uneven-float64", torch.float32)])
    def test_wrong_dtype(self, engine: Engine, name: str, told: torch.dtype) -> None:
        """The dtype of y is not that of x."""
        for rank in run(engine, lying.WrongDtype, workload_like(name, PAIR)).ranks:
            assert told == rank.microbatches[0].y_dtype

    @pytest.mark.parametrize(("name", "right"), [("uneven", True), ("halves-in-flight-even", False)])
    def test_keeps_handle(self, engine: Engine, name: str, right: bool) -> None:
        """One step at a time is right; of two in flight the first does not come back."""
        workload = workload_like(name, PAIR)
        correct, liar = run(engine, Native, workload), run(engine, lying.KeepsHandle, workload)
        for a, b in zip(correct.ranks, liar.ranks, strict=True):
            same = b.status == "ok" and torch.equal(a.microbatches[0].y, b.microbatches[0].y)
            assert right == same

    @pytest.mark.parametrize("liar", [lying.CopyingWindows, lying.HidesParameter])
    def test_windows(self, engine: Engine, liar: type[Native]) -> None:
        """What was not written is seen, and the output is not a number."""
        for rank in run(engine, liar, workload_like("own-even", PAIR)).ranks:
            assert rank.uncovered
            assert rank.microbatches[0].y.isnan().all()

    def test_ignores_config(self, engine: Engine) -> None:
        """Weights asked for on the input are applied elsewhere, and an unknown knob is taken in silence."""
        workload = workload_like("input-weights-even", PAIR, extra=(("no_such_knob", 1),))
        assert {"refused"} == {rank.status for rank in run(engine, Native, workload).ranks}
        for rank in run(engine, lying.IgnoresConfig, workload).ranks:
            assert "combine" == rank.resolved["weights"]

    def test_refuses_late(self, engine: Engine) -> None:
        """A refusal in the running step is an exception like any other."""
        for rank in run(engine, lying.RefusesLate, workload_like("uneven", PAIR)).ranks:
            assert ("raised", "forward:0") == (rank.status, rank.reached)

    def test_wrong_groups(self) -> None:
        """The groups of ep and etp are not those of the layout."""
        layout = Layout(4, ep=2, etp=2)
        told = lying.WrongGroups().groups(layout.sizes())
        assert {"ep", "etp"} == {name for name, lists in layout.groups().items() if told[name] != lists}


@pytest.mark.parametrize("name", ["to-capacity-beyond-even", "lossless-minimum", "lossless-by-turns"])
def test_experts_filled_up_beyond_the_tokens_of_a_rank_have_room(name: str) -> None:
    """A capacity, or the least of one, may be more than the tokens that there are."""
    (workload,) = (each for each in padded_experts.padded("lowlatency", Layout(2, ep=2), "full") if each.name == name)
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        outcome = moe_step(engine, "native", workload)
    tally = Tally()
    judge_outputs(read(outcome), tally)
    assert 0 in tally.ranks  # in one of them rank 1 has no tokens


class TestWire:
    def test_what_is_too_large_for_a_scale_arrives_as_no_number(self) -> None:
        """A float64 beyond float32 is not the largest number of eight bits."""
        sent_RD = torch.tensor([[1e39, 1.0], [2.0, torch.inf]], dtype=torch.float64)
        got_RD, _ = Float8Wire().unpack(Float8Wire().pack(sent_RD), 2, torch.float64)
        assert [[True, False], [False, True]] == got_RD.isnan().tolist()
