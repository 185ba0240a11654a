"""The pinned corpus is what it claims: adversarial, uneven, distinct everywhere, and the same each time."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

import moe_conformance.reference.routing.routes
from moe_conformance.chapters.capacity.workloads.dropping_layers import dropping
from moe_conformance.chapters.cost.workloads import more_experts
from moe_conformance.chapters.exchange.workloads.one_option import KNOBS, names, one_at_a_time, turned
from moe_conformance.chapters.forcing.workloads.delivered import routed as forced
from moe_conformance.contract import Config, Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.shared.layer.expected import LayerExpected
from moe_conformance.workloads.layers import DROP_MARGIN, drop_margin, layers
from moe_conformance.workloads.recipes import corpus
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.features import broken, features, halves_in_flight, has_empty_slots, in_flight
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Drawn, Twist, Workload
from moe_conformance.workloads.routers import routing_corpus
from moe_conformance.workloads.scripts import scripts
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, beside, full_layouts, quick_layouts

EP2 = Layout(4, ep=2)

# (tp, ep, etp) of the whole exchange family.
FOLDINGS = "111 121 141 181 211 212 221 222 241 122 142 411 414 422"


def named(name: str, layout: Layout = EP2) -> Workload:
    """The workload of that name."""
    return next(w for w in corpus("any", layout, "full") if w.name == name)


def load_of(workload: Workload) -> Counter[int]:
    """How many slots name each expert."""
    ids = [batch.ids_TK for microbatch in workload.batches for batch in microbatch]
    return Counter(e for each in ids for e in each.reshape(-1).tolist() if e >= 0)


def same(one: object, other: object) -> bool:
    """Whether two records hold the same data, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and list(one) == list(other) and same([*one.values()], [*other.values()])
    if isinstance(one, (tuple, list, Drawn)):
        pairs = zip(one, other, strict=True) if isinstance(other, (tuple, list, Drawn)) else [(one, other)]
        return all(same(first, second) for first, second in pairs)
    return one == other


class TestCorpus:
    @pytest.mark.parametrize("layout", [Layout(1), EP2, Layout(4, ep=2, etp=2)], ids=lambda layout: layout.name)
    def test_variants_meet_the_same_workloads(self, layout: Layout) -> None:
        """What is drawn for one variant and run through another is what would be drawn for the other."""
        drawn = []
        for variant in ("one", "other"):
            own = (workload for chapter, workload in scripts(variant, layout, "full") if chapter.variants == "every")
            drawn.append([*corpus(variant, layout, "full"), *own])
        for one, other in zip(*drawn, strict=True):
            assert same(other, one.through("other")), one.name

    @pytest.mark.parametrize("layout", full_layouts(), ids=lambda layout: layout.name)
    def test_layouts_are_valid_and_names_unique(self, layout: Layout) -> None:
        """Every layout can be built, and no two workloads on it share a name."""
        assert layout.problem is None
        steps = (*corpus("any", layout, "full"), *routing_corpus("any", layout, "full"))
        every = (*steps, *(workload for _, workload in scripts("any", layout, "full")))
        names = [w.name for w in every]
        assert len(names) == len(set(names))

    def test_quick_layouts_are_part_of_the_full_ones(self) -> None:
        """What passes quick is judged again in full."""
        assert {*quick_layouts(), *beside("quick")} <= {*full_layouts(), *beside("full")}

    def test_every_folding_is_there(self) -> None:
        """All products of tp, ep and etp that 8 ranks allow, some with replicas, and one layout with every axis."""
        layouts = full_layouts()
        assert set(FOLDINGS.split()) <= {f"{each.tp}{each.ep}{each.etp}" for each in layouts}
        assert {1, 2, 4} <= {each.edp for each in layouts}
        assert any(min(each.tp, each.cp, each.pp, each.ep, each.etp) > 1 for each in layouts)

    @pytest.mark.parametrize("layout", [each for each in full_layouts() if each.world > USUAL_RANKS], ids=str)
    def test_many_ranks_see_every_run(self, layout: Layout) -> None:
        """The part of the corpus that runs on more ranks than usual leaves no dtype, load or phase out."""
        drawn, runs = list(corpus("any", layout, "full")), (ExchangeStep(), ExpertsStep())
        found = {run: [workload for workload in drawn if workload.run == run] for run in runs}
        for run, workloads in found.items():
            asked = [features(workload, "cpu") for workload in workloads]
            assert {torch.float32, torch.float64} <= {each["dtype"] for each in asked}
            assert {True, False} == {each["uneven_tokens"] for each in asked} == {each["zero_tokens"] for each in asked}
            assert 2 == max(each["in_flight"] for each in asked)
            assert {"no", "group_max"} <= {workload.config.padding.tokens for workload in workloads}
            if run == ExchangeStep():
                assert {torch.bfloat16, torch.float16} <= {each["dtype"] for each in asked}
                assert 2 == max(each["halves_in_flight"] for each in asked)
                assert 2 == max(each["token_dims"] for each in asked)
                assert any(has_empty_slots(workload) for workload in workloads)
                assert any(each["duplicate_experts"] for each in asked)

    def test_columns_need_not_be_two(self) -> None:
        """Tokens come in three columns too, an odd number of them, and a rank may have none."""
        workload = named("three-columns-uneven")
        assert [(3, 3), (1, 3), (5, 3), (0, 3)] == [workload.lead_of(len(b.x_TD)) for b in workload.batches[0]]

    def test_tensor_ranks_share_what_does_not_divide(self) -> None:
        """The tokens of some tensor group are no multiple of tp."""
        for layout in (each for each in full_layouts() if each.tp > 1):
            sizes = [[len(batch.x_TD) for batch in ranks] for ranks in named("in-flight-uneven", layout).batches]
            shared = [sum(each[rank] for rank in group) for group in layout.groups()["tp"] for each in sizes]
            assert any(T % layout.tp for T in shared), layout.name

    def test_the_same_bytes_each_time(self) -> None:
        """Drawing twice gives equal tensors."""
        for one, two in zip(corpus("any", EP2, "quick"), corpus("any", EP2, "quick"), strict=True):
            for a, b in zip(sum(one.batches, ()), sum(two.batches, ()), strict=True):
                assert torch.equal(a.x_TD, b.x_TD)
                assert torch.equal(a.weights_TK, b.weights_TK)
                assert torch.equal(a.upstream, b.upstream)

    def test_batches_are_drawn_when_they_are_looked_at(self) -> None:
        """Of a workload that nobody runs only the numbers of tokens are there; ranks get all of it, as a tuple."""
        looked = []

        def draw(microbatch: int, rank: int) -> Batch:
            looked.append((microbatch, rank))
            return Batch(torch.full((1, 1), 10.0 * microbatch + rank), *[torch.zeros(1, 1)] * 3)

        workload = Workload("x", ExchangeStep(), Config(), Layout(2), Drawn(((1, 1), (1, 1)), draw))
        assert ((1, 1), (1, 1)) == workload.tokens
        assert (2, []) == (len(workload.batches), looked)
        sent = pickle.loads(pickle.dumps(workload))
        assert isinstance(sent.batches, tuple)
        assert [[0.0, 1.0], [10.0, 11.0]] == [[batch.x_TD.item() for batch in ranks] for ranks in sent.batches]
        assert workload.tokens == sent.tokens
        assert [(0, 0), (0, 1), (1, 0), (1, 1)] == looked

    @pytest.mark.parametrize("layout", [Layout(1), EP2, Layout(6, ep=3, etp=2)], ids=lambda layout: layout.name)
    def test_numbers_of_tokens_are_those_of_the_batches(self, layout: Layout) -> None:
        """What is known of batches before they are drawn is true of them."""
        for workload in (*corpus("any", layout, "full"), *layers("any", layout, "full")):
            drawn = tuple(tuple(len(batch.x_TD) for batch in ranks) for ranks in workload.batches)
            assert drawn == workload.tokens, workload.name

    def test_ranks_and_microbatches_differ(self) -> None:
        """No two batches of a workload share tokens, and upstream gradients are not constant but where they say so."""
        for workload in corpus("any", EP2, "quick"):
            batches = [batch for batch in sum(workload.batches, ()) if batch.x_TD.numel()]
            firsts = {tuple(batch.x_TD[0].tolist()) for batch in batches}
            assert len(batches) == len(firsts), workload.name
            if workload.name != "all-alike-even":
                assert all(batch.upstream.unique().numel() > 4 for batch in batches), workload.name

    def test_experts_differ(self) -> None:
        """No two experts of a workload have the same parameters."""
        workload = named("own-even")
        gates = {tuple(workload.parameters["gate", e].reshape(-1).tolist()) for e in range(8)}
        assert 8 == len(gates)

    def test_loads_are_unequal(self) -> None:
        """The plain workloads load experts unequally, so that equal splits cannot pass by accident."""
        for name in ("even", "uneven", "own-even"):
            assert len(set(load_of(named(name)).values())) > 1, name

    def test_names_keep_their_promise(self) -> None:
        """The adversarial workloads are as extreme as their names."""
        assert 0 == load_of(named("empty-expert-even"))[1]
        assert {0, 1, 2, 3} == set(load_of(named("idle-rank-even")))
        assert {4, 5, 6, 7} == set(load_of(named("one-rank-even")))
        assert {6} == set(load_of(named("one-expert-even")))
        assert 0 in {batch.x_TD.shape[0] for batch in named("rank-without-tokens").batches[0]}
        assert any(bool((batch.ids_TK[0] < 0).all()) for batch in named("dropped-even").batches[0])
        assert 6 == named("odd-experts-even").config.experts
        sizes = named("sizes-by-turns-even").batches
        assert [8, 0, 1, 64, 9] == [len(ranks[1].x_TD) for ranks in sizes]
        assert {6} == {expert for batch in sizes[-1] for expert in batch.ids_TK.flatten().tolist()}

    def test_even_means_even(self) -> None:
        """A workload named even gives all ranks the same number of tokens in every microbatch."""
        for workload in corpus("any", EP2, "full"):
            promised = "even" in workload.name.replace("uneven", "")
            assert promised is not features(workload, "cpu")["uneven_tokens"], workload.name


class TestExactness:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_products_of_a_probe_run_are_exact(self, dtype: torch.dtype) -> None:
        """Weight times upstream times gain times part survives the dtype unrounded."""
        generator = draw.generator("exactness")
        config = named("even").config
        batch = draw.probe_batch(0, 0, draw.choose(64, config, generator), config, generator)
        product_TKD = batch.weights_TK.double()[:, :, None] * batch.upstream.double()[:, None, :]
        for factor in (0.5, 1.0, 2.0, -1.0, 3.0):
            exact = product_TKD * factor
            assert torch.equal(exact, exact.to(dtype).double())

    def test_weights_are_distinct_within_a_token(self) -> None:
        """No two slots of a token share a weight, so that shifted weights show."""
        weights_TK = named("top-all-even").batches[0][0].weights_TK
        assert all(8 == len(set(row.tolist())) for row in weights_TK)


class TestRouting:
    # Rounding leaves open what some tokens choose among groups of nearly the same score.
    @pytest.mark.parametrize(("field", "least"), [("balance_bias", 1), ("groups", 6)])
    def test_bias_and_groups_change_some_choice(self, field: str, least: int) -> None:
        """In every workload with a bias or a group limit so many tokens choose otherwise than without."""
        layouts = [layout for layout in full_layouts() if layout.world <= USUAL_RANKS]
        drawn = [w for layout in layouts for w in routing_corpus("any", layout, "full")]
        judged = [w for w in drawn if getattr(w.config.routing, field)]
        assert len(judged) >= 4 * len(layouts)
        for workload in judged:
            bias_E = workload.parameters.get(("balance_bias", None))
            with_it = chosen(workload, workload.config.routing.groups, bias_E)
            without = chosen(
                workload,
                workload.config.routing.groups if field == "balance_bias" else None,
                None if field == "balance_bias" else bias_E,
            )
            assert least <= sum(one != other for one, other in zip(with_it, without, strict=True)), workload

    def test_near_ties_are_ties_in_bfloat16_alone(self) -> None:
        """Every token's last choice beats its twin by a margin that float32 can tell and bfloat16 cannot."""
        workload = next(w for w in routing_corpus("any", EP2) if w.name == "route-near-ties")
        x_TD = torch.cat([batch.x_TD for batch in workload.batches[0]])
        logits_TE = x_TD.double() @ workload.parameters["router", None].double().T
        ranked_TE = logits_TE.sort(1, descending=True).values
        margin_T = (ranked_TE[:, 2] - ranked_TE[:, 3]).abs() / ranked_TE[:, 2].abs()
        assert bool((margin_T > 2**-10).all())
        assert bool((margin_T < 2**-8).all())

    @pytest.mark.parametrize("name", ["bfloat16", "float16"])
    def test_near_biases_are_ties_in_half_precision(self, name: str) -> None:
        """All scores are equal; of the rounded biases several share the last place of a choice."""
        workload = next(w for w in routing_corpus("any", EP2) if w.name == f"route-near-biases-{name}")
        assert not any(bool(batch.x_TD.any()) for batch in workload.batches[0])
        bias_E, K = workload.parameters["balance_bias", None], workload.config.top_k
        assert len(bias_E) == len(bias_E.unique())
        ranked_E = bias_E.to(workload.config.dtype).sort(descending=True).values
        assert ranked_E[K - 1] == ranked_E[K]


class TestOtherSizes:
    def test_the_expert_of_the_suite_has_a_column_for_each_expert(self) -> None:
        """A run with twice the experts of any exchange has at least as many columns, on 8 ranks too."""
        for layout in (EP2, Layout(8, ep=8)):
            for workload in corpus("any", layout, "full"):
                if workload.run == ExchangeStep():
                    for other in more_experts(workload):
                        config = other.workload.config
                        assert 2 * workload.config.experts == config.experts <= config.hidden, other.workload


class TestDropping:
    @pytest.mark.parametrize(
        "layout", [each for each in full_layouts() if each.world <= USUAL_RANKS], ids=lambda layout: layout.name
    )
    def test_who_stays_is_known(self, layout: Layout) -> None:
        """One capacity is legal everywhere; of half of the slots some tokens lose none, some one and some both."""
        for workload in dropping("any", layout, "full"):
            kept = LayerExpected.of_session(workload, "output", "sum").kept
            assert set(kept) == {(m, rank) for m in range(len(workload.batches)) for rank in range(layout.world)}
            left = {0, 1, 2} if workload.config.capacity.factor else {0}
            assert left == {k for kept_TK in kept.values() for k in kept_TK.sum(1).tolist()}, workload.name
            batches = [batch.x_TD for of_ranks in workload.batches for batch in of_ranks]
            margins = [drop_margin(x_TD, workload.config, dict(workload.parameters)) for x_TD in batches]
            assert min(margins) > DROP_MARGIN, workload.name


def chosen(workload: Workload, groups: tuple[int, int] | None, bias_E: torch.Tensor | None) -> list[list[int]]:
    """The experts that the oracle chooses for every token, sorted."""
    x_TD = torch.cat([batch.x_TD for batch in workload.batches[0]])
    logits_TE = x_TD.double() @ workload.parameters["router", None].double().T
    config = workload.config
    routed = moe_conformance.reference.routing.routes.route(
        logits_TE,
        top_k=config.top_k,
        score=config.routing.score,
        bias_E=bias_E,
        groups=groups,
        group_score=config.routing.group_score,
    )
    return routed.ids_TK.sort(1).values.tolist()


class TestFeatures:
    @pytest.mark.parametrize(
        ("schedule", "expected"), [("F0 B0", 1), ("F0 B0 F1 B1", 1), ("F0 F1 B0 B1", 2), ("D0 D1 C0 C1 B1 B0", 2)]
    )
    def test_in_flight_counts_overlap(self, schedule: str, expected: int) -> None:
        """A microbatch is in flight from its forward to its backward."""
        assert expected == in_flight(schedule)

    @pytest.mark.parametrize(
        ("schedule", "expected"), [("F0 F1 B0 B1", 1), ("D0 C0 D1 C1 B0 B1", 1), ("D0 D1 C1 C0 B1 B0", 2)]
    )
    def test_halves_in_flight_count_dispatches_without_combine(self, schedule: str, expected: int) -> None:
        """Halves are in flight from their dispatch to their combine; a whole forward never leaves one open."""
        assert expected == halves_in_flight(schedule)

    def test_a_limit_is_broken_by_what_lies_outside(self) -> None:
        """A workload breaks the first limit whose allowed values do not hold its own."""
        even = Limit("uneven_tokens", (False,), "needs equal token counts")
        single = Limit("dtype", (torch.float32,), "float32 only")
        assert even == broken((single, even), named("uneven"), "cpu")
        assert broken((single, even), named("even"), "cpu") is None

    def test_the_tokens_of_every_rank_have_to_be_allowed(self) -> None:
        """One rank with another number of tokens breaks the limit."""
        eights = Limit("tokens", range(0, 1 << 20, 8), "blocks of 8 tokens")
        assert broken((eights,), named("even"), "cpu") is None
        assert eights == broken((eights,), named("uneven"), "cpu")
        batches = named("even").batches
        one = replace(batches[0][0], x_TD=batches[0][0].x_TD[:-1])
        assert eights == broken((eights,), replace(named("even"), batches=((one, *batches[0][1:]),)), "cpu")

    def test_steps_are_counted(self) -> None:
        """A backend whose gradients cannot be finished again says so, and twins of several steps are left out."""
        once, workload = Limit("steps", (1,), "what is finished is frozen"), named("even")
        assert broken((once,), workload, "cpu") is None
        for schedule in ("F0 B0 S F1 B1", "F0 B0 Z F1 B1 Z F2 B2"):
            assert once == broken((once,), replace(workload, schedule=schedule), "cpu")

    def test_deterministic_algorithms_are_seen(self) -> None:
        """A backend that has none says so, and runs that ask for them are left out."""
        none, workload = Limit("deterministic", (False,), "sums are taken as they come"), named("even")
        assert broken((none,), workload, "cpu") is None
        assert none == broken((none,), replace(workload, twist=Twist(deterministic=True)), "cpu")

    def test_duplicates_are_seen(self) -> None:
        """An expert twice in one row is a duplicate; two empty slots are not."""
        assert features(named("duplicates-even"), "cpu")["duplicate_experts"]
        assert not features(named("dropped-even"), "cpu")["duplicate_experts"]

    def test_ids_that_a_router_selects_are_no_empty_slots(self) -> None:
        """A backend without empty slots runs an exchange of its router's ids, which the workload cannot give."""
        (routed,) = [each for each in forced("alltoall", EP2, "quick") if each.name == "routed-round-robin"]
        assert bool((routed.batches[0][0].ids_TK < 0).all())
        assert not features(routed, "cpu")["dropped_slots"]
        assert features(named("dropped-even"), "cpu")["dropped_slots"]


class TestOneAtATime:
    def test_every_configuration_differs_in_one_field(self) -> None:
        """The base comes first, and each of the others differs from it in exactly one option."""
        base = Config(top_k=3, extra=(("other", 1),))
        (first, same), *others = one_at_a_time(base, {**KNOBS, "top-k": ("top_k", (3, 4))})
        assert ("base", base) == (first, same)
        for name, config in others:
            changed = [option for option, value in config.options().items() if value != base.options()[option]]
            assert 1 == len(changed), name
        assert (("other", 1), ("moe_permute_fusion", True)) == dict(others)["moe-permute-fusion-True"].extra

    def test_an_unknown_knob_is_refused(self) -> None:
        """An option that is neither one of the configuration nor marked as one backend's own is told."""
        with pytest.raises(ValueError, match="Config has no option 'fused'"):
            list(one_at_a_time(Config(), {"fused": ("fused", (True,))}))

    def test_every_name_is_drawn(self) -> None:
        """The workloads go under the names that waivers may use."""
        drawn = [workload.name for workload in turned("alltoall", Layout(2, ep=2), "quick")]
        assert names() == tuple(drawn)
