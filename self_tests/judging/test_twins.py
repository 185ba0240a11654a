"""Twins are made of their originals' tokens, and a run is held against them token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.chapters.gradients.judge.gradient_accumulation import judge_sum
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.equivalence.refusals import judge_strided, judge_with_a_graph
from moe_conformance.judging.shared.equivalence.runs import Ran, judge_alike, judge_repeated, judge_scaled
from moe_conformance.judging.verdict import (
    ChangedInput,
    Mismatch,
    NotOffered,
    Raised,
    Tally,
    WrongDelivery,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.scenarios import state
from moe_conformance.scenarios.outcome import Finish, Grad, Outcome, RankOutcome
from moe_conformance.scenarios.tensors import NOBODYS_ID, laid_out
from moe_conformance.workloads import laws
from moe_conformance.workloads.recipes import corpus
from moe_conformance.workloads.records.workload import ParameterKey, Workload
from moe_conformance.workloads.twins import Twin
from self_tests.judging.breaking import edit
from self_tests.judging.simulated_exchange import Simulation, simulate, workload
from self_tests.judging.simulated_experts import own_workload, simulate_experts

LAYOUT = Layout(4, ep=2)
UNEVEN = next(w for w in corpus("any", LAYOUT, "full") if w.name == "uneven")
WORK = replace(workload(drop=True), likened="full")


def sources(twin: Twin) -> list[tuple[int, ...]]:
    """Every token of a twin, by where it comes from."""
    return [tuple(source) for rows in chain(*twin.origin) for source in rows.source_T3.tolist()]


def tokens(work: Workload) -> list[tuple[int, int, int]]:
    """Every token of a workload."""
    return [
        (m, rank, t)
        for m, ranks in enumerate(work.batches)
        for rank, batch in enumerate(ranks)
        for t in range(len(batch.x_TD))
    ]


def spoilt(outcome: Outcome, rank: int, **changed: Any) -> Outcome:
    """Change what a rank saw of microbatch 0."""
    return edit(outcome, rank, lambda seen: replace(seen, **changed))


class TestLaws:
    @pytest.mark.parametrize("law", [laws.reordered, laws.relabelled, laws.spread, laws.packed, laws.scaled])
    def test_every_token_is_in_it_once(self, law: Callable[[Workload], list[Twin]]) -> None:
        """No token is lost and none comes twice, wherever it goes."""
        for twin in law(replace(UNEVEN, likened="full")):
            assert tokens(UNEVEN) == sorted(sources(twin)), twin.how

    def test_rows_keep_what_is_theirs(self) -> None:
        """A token takes its upstream gradient along, and every slot its weight."""
        (twin,) = laws.reordered(WORK)
        moved = 0
        for rank, (rows, batch) in enumerate(zip(twin.origin[0], twin.workload.batches[0], strict=True)):
            was = WORK.batches[0][rank]
            for i, (_, _, t) in enumerate(rows.source_T3.tolist()):
                moved += i != t
                assert torch.equal(was.upstream[t], batch.upstream[i])
                pairs = zip(batch.ids_TK[i].tolist(), batch.weights_TK[i].tolist(), strict=True)
                assert sorted(zip(was.ids_TK[t].tolist(), was.weights_TK[t].tolist(), strict=True)) == sorted(pairs)
        assert moved

    def test_relabelled_experts_answer_as_before(self) -> None:
        """The probe answers for an expert's new number as for the old one; empty slots stay empty."""
        for twin in laws.relabelled(WORK):
            for was, now in zip(WORK.batches[0], twin.workload.batches[0], strict=True):
                back_E = torch.tensor([*twin.workload.twist.probe_as, -1])
                assert torch.equal(was.ids_TK, back_E[now.ids_TK])

    def test_one_token_of_every_rank_is_for_the_same_expert(self) -> None:
        """So that all others are idle."""
        bare = next(w for w in corpus("any", LAYOUT, "quick") if w.name == "own-unweighted-even")
        twins = laws.among_fewer(bare)
        routed = [[batch.ids_TK.tolist() for batch in twin.workload.batches[0]] for twin in twins]
        assert [[1] * 4, [12] * 4, [1] * 4] == [[len(ids) for ids in ranks] for ranks in routed]
        assert all(ids == routed[2][0] for ids in routed[2])

    def test_a_step_in_turn_comes_twice(self) -> None:
        """Both steps of a twin in turn are the original's."""
        for twin in determinism.in_turn(WORK):
            assert sorted(2 * tokens(WORK)) == sorted(sources(twin))


class TestStrides:
    @pytest.mark.parametrize("stride", ["rows", "columns", "transposed", "packed"])
    def test_values_lie_apart(self, stride: str) -> None:
        """A view holds the values and is not contiguous, and what lies between them is no number."""
        values = torch.arange(12.0).reshape(4, 3)
        view = laid_out(values, stride)  # type: ignore[arg-type]
        assert torch.equal(values, view)
        assert not view.is_contiguous()
        memory = view.as_strided((view.untyped_storage().nbytes() // 4,), (1,), 0)
        assert memory.numel() - 12 == int(memory.isnan().sum())

    def test_ids_lie_between_ids_of_nobody(self) -> None:
        """What lies between ids is no expert's."""
        view = laid_out(torch.zeros(2, 2, dtype=torch.int64), "columns")
        assert {0, NOBODYS_ID} == set(view.as_strided((8,), (1,), 0).tolist()[:7])

    def test_one_row_for_all(self) -> None:
        """Rows that are the same are there once, and others are not expanded."""
        assert (0, 1) == laid_out(torch.tensor([[1.0, 2.0]] * 3), "expanded").stride()
        assert (0, 0) == laid_out(torch.ones(3, 2), "expanded").stride()
        with pytest.raises(ValueError, match="differ"):
            laid_out(torch.eye(2), "expanded")


def judged(
    original: Outcome,
    twin: Twin,
    outcome: Outcome | None,
    judge: Callable[..., None] = judge_alike,
) -> Tally:
    """Judge one twin."""
    tally = Tally()
    judge(read(original), [Ran(twin, outcome, "why not")], tally)
    return tally


class TestJudgement:
    def test_a_correct_twin_passes(self) -> None:
        """What only lies elsewhere is counted as equal."""
        for twin in (*laws.reordered(WORK), *laws.scaled(WORK), *laws.strided(WORK), *laws.packed(WORK)):
            assert judged(simulate(WORK), twin, simulate(twin.workload)).elements

    def test_a_token_that_differs_is_told_with_where_it_was(self) -> None:
        """The sentence says how the twin differs, which token is wrong and which one it was."""
        (twin,) = laws.reordered(WORK)
        outcome = simulate(twin.workload)
        y = outcome.ranks[1].microbatches[0].y
        assert y is not None
        wrong = y.clone()
        wrong[2, 5] += 1
        t = int(twin.origin[0][1].source_T3[2, 2])
        with pytest.raises(WrongOutput, match="with tokens and slots in another order, y of rank 1 token 2") as caught:
            judged(simulate(WORK), twin, spoilt(outcome, 1, y=wrong))
        assert (f"(rank 1 token {t} of microbatch 0)" in str(caught.value)) == (t != 2)
        assert (1,) == caught.value.ranks

    def test_bits_count_where_the_law_says_so(self) -> None:
        """A zero of the other sign is another byte."""
        twin = laws.unasked(WORK)[1]
        outcome = simulate(twin.workload)
        dx = outcome.ranks[0].microbatches[0].dx_TD.value
        assert dx is not None
        flipped = torch.where(dx == 0, -dx, dx)
        assert not torch.equal(dx.view(torch.int32), flipped.view(torch.int32))
        with pytest.raises(WrongGradient, match="dx of rank 0"):
            judged(simulate(WORK), twin, spoilt(outcome, 0, dx_TD=Grad(flipped)))

    def test_other_bits_within_rounding_are_counted(self) -> None:
        """Of strided inputs the same values are required; a zero of the other sign is told as a fact."""
        twin = laws.strided(WORK)[0]
        outcome = simulate(twin.workload)
        dx = outcome.ranks[0].microbatches[0].dx_TD.value
        assert dx is not None
        flipped = torch.where(dx == 0, -dx, dx)
        zeros = int((dx == 0).sum())
        same = judged(simulate(WORK), twin, outcome, judge_strided)
        tally = judged(simulate(WORK), twin, spoilt(outcome, 0, dx_TD=Grad(flipped)), judge_strided)
        assert (0, same.of_two_runs) == (same.other_bits, tally.of_two_runs)
        assert zeros == tally.other_bits > 0

    def test_strided_inputs_give_other_values(self) -> None:
        """A gradient that differs by more than rounding is told."""
        twin = laws.strided(WORK)[0]
        outcome = simulate(twin.workload)
        dx = outcome.ranks[0].microbatches[0].dx_TD.value
        assert dx is not None
        with pytest.raises(WrongGradient, match="dx of rank 0"):
            judged(simulate(WORK), twin, spoilt(outcome, 0, dx_TD=Grad(dx * 1.5)), judge_strided)

    def test_a_graph_may_be_refused_by_all(self) -> None:
        """An error in the backward of every rank refuses create_graph; an error on one rank alone is a failure."""
        (twin,) = laws.with_a_graph(WORK)
        outcome = simulate(twin.workload)
        raised = [replace(rank, status="raised", reached="backward:0", error="no graph") for rank in outcome.ranks]
        with pytest.raises(NotOffered, match="refused on every rank with no graph"):
            judged(simulate(WORK), twin, replace(outcome, ranks=tuple(raised)), judge_with_a_graph)
        with pytest.raises(Raised, match="run with create_graph"):
            judged(simulate(WORK), twin, replace(outcome, ranks=(*raised[:1], *outcome.ranks[1:])), judge_with_a_graph)

    def test_rows_in_other_places_are_told(self) -> None:
        """Of strided inputs rows arrive in the same order too."""
        twin = laws.strided(WORK)[0]
        other = simulate(twin.workload, Simulation(rows=lambda rank, rows: rows.flip(0)))
        with pytest.raises(WrongDelivery, match="delivered to rank 0"):
            judged(simulate(WORK), twin, other, judge_strided)

    def test_a_gradient_that_is_gone_is_told(self) -> None:
        """None is not the gradient that it was."""
        (twin,) = laws.scaled(WORK)
        with pytest.raises(WrongGradient, match="dweights of rank 0 is None instead of a tensor in the original run"):
            judged(simulate(WORK), twin, spoilt(simulate(twin.workload), 0, dweights_TK=Grad(None)))

    def test_nothing_is_decided_without_a_run(self) -> None:
        """A twin that could not be run decides nothing."""
        with pytest.raises(NotOffered, match="why not"):
            judged(simulate(WORK), laws.strided(WORK)[0], None)

    def test_weights_at_the_input_scale_nothing(self) -> None:
        """Experts are no linear function of their input."""
        (twin,) = laws.scaled(WORK)
        simulation = Simulation(weights_at="input")
        with pytest.raises(NotOffered, match="input"):
            judged(simulate(WORK, simulation), twin, simulate(twin.workload, simulation), judge_scaled)

    def test_only_what_is_built_anew_may_be_refused(self) -> None:
        """A twin through the same exchange on the same ranks cannot be refused."""
        asked = [
            twin for law in (laws.reordered, laws.strided, determinism.seeded, determinism.again) for twin in law(WORK)
        ]
        assert not any(twin.anew for twin in asked)
        assert all(twin.anew for twin in (*laws.exchanged(WORK, ["another"]), *determinism.in_turn(WORK)))

    def test_others_are_held_against_the_first(self) -> None:
        """The first may differ in bits, and the others have its bits and not the original's."""
        own = own_workload(dtype=torch.bfloat16)
        first, other = determinism.deterministic(own), determinism.again(own)[0]
        was = simulate_experts(own)
        y = was.ranks[0].microbatches[0].y
        assert y is not None
        nudged = y * (1 + 2.0**-7)  # the last place
        assert not torch.equal(y, nudged)
        a, b = (spoilt(replace(was, workload=twin.workload), 0, y=nudged) for twin in (first, other))
        tally = Tally()
        judge_repeated(read(was), [Ran(first, a), Ran(other, b)], tally)
        assert tally.elements
        with pytest.raises(WrongOutput, match="run in fresh processes, y of rank 0"):
            judge_repeated(read(was), [Ran(first, a), Ran(other, replace(was, workload=other.workload))], Tally())
        with pytest.raises(NotOffered, match="none here"):
            judge_repeated(read(was), [Ran(first, None, "none here"), Ran(other, b)], Tally())

    def test_what_was_left_alone_stays_so(self) -> None:
        """A twin that writes into its input is told; one whose original did so too is not: another check tells that."""
        twin = laws.strided(WORK)[0]
        wrote = spoilt(simulate(twin.workload), 1, inputs_changed=("x",))
        with pytest.raises(ChangedInput, match=r"with x transposed.*, x is overwritten on rank 1"):
            judged(simulate(WORK), twin, wrote)
        assert judged(spoilt(simulate(WORK), 0, inputs_changed=("x",)), twin, wrote).elements


class TestSeed:
    def test_generators_are_put_back(self) -> None:
        """Behind a run with a seed the generators stand where they stood."""
        before = torch.get_rng_state(), random.getstate()
        numpy_before = repr(numpy.random.get_state())
        with state.seeded(3, torch.device("cpu")):
            drawn = float(torch.rand(())), random.random(), float(numpy.random.random_sample())
        assert torch.equal(before[0], torch.get_rng_state())
        assert (before[1], numpy_before) == (random.getstate(), repr(numpy.random.get_state()))
        with state.seeded(3, torch.device("cpu")):
            assert drawn == (float(torch.rand(())), random.random(), float(numpy.random.random_sample()))


class TestRefusal:
    def raised(self, reached: str, before: int) -> Outcome:
        """Every rank raised in a phase that began after some collectives, and none was called since 0."""
        twin = laws.strided(WORK)[0]
        ranks = tuple(
            RankOutcome(r, "raised", reached, error="RuntimeError: strides", phases=((reached, before),))
            for r in range(WORK.layout.world)
        )
        return Outcome("simulated", twin.workload, ranks, 0.0)

    def test_an_error_at_once_is_a_refusal(self) -> None:
        """Strides may be refused before anything travels."""
        with pytest.raises(NotOffered, match="refused with RuntimeError: strides"):
            judged(simulate(WORK), laws.strided(WORK)[0], self.raised("forward:0", 0), judge_strided)

    def test_a_refusal_of_some_ranks_is_none(self) -> None:
        """What one rank alone refuses leaves others waiting for it, and the sentence tells which."""
        outcome = self.raised("forward:0", 0)
        waiting = replace(outcome.ranks[-1], status="hung", error=None, secondary=True)
        outcome = replace(outcome, ranks=(*outcome.ranks[:-1], waiting))
        with pytest.raises(Raised, match=r"rank 0.* refused at once with RuntimeError: strides, and rank \d did not"):
            judged(simulate(WORK), laws.strided(WORK)[0], outcome, judge_strided)

    def test_an_error_later_is_none(self) -> None:
        """In the backward it is too late."""
        with pytest.raises(Raised, match="run with x transposed"):
            judged(simulate(WORK), laws.strided(WORK)[0], self.raised("backward:0", 0), judge_strided)


class TestParameters:
    def test_gradients_are_put_together_and_compared(self) -> None:
        """Parameters end with what they had, experts under other numbers too."""
        own = own_workload()
        for law in (laws.reordered, laws.relabelled, laws.packed):
            for twin in law(replace(own, likened="quick")):
                tally = judged(simulate_experts(own), twin, simulate_experts(twin.workload))
                assert tally.elements > sum(value.numel() for value in own.parameters.values())

    def test_a_gradient_that_differs_is_told(self) -> None:
        """The sentence names the parameter and the expert."""
        own = own_workload()
        (twin,) = laws.reordered(own)
        outcome = simulate_experts(twin.workload)
        final = dict(outcome.ranks[0].grads_final or {})
        key = next(iter(final))
        value = final[key].value
        assert value is not None
        final[key] = replace(final[key], value=value + 1)
        ranks = (replace(outcome.ranks[0], grads_final=final), *outcome.ranks[1:])
        words = f"the gradient of {key[0]} of expert {key[1]} differs from the original run"
        with pytest.raises(Mismatch, match=words):
            judged(simulate_experts(own), twin, replace(outcome, ranks=ranks))

    def test_zeros_are_a_gradient_unless_there_was_room_for_it(self) -> None:
        """Frozen parameters have none: zeros only in a buffer that was made before."""
        own = own_workload()
        frozen = next(twin for twin in laws.unasked(own) if twin.workload.twist.unasked == ("parameters",))

        def ended(value: Tensor | None, buffered: bool) -> Outcome:
            outcome = simulate_experts(frozen.workload)
            return replace(
                outcome,
                ranks=tuple(
                    replace(
                        rank,
                        grads_local={key: Grad(None) for key in rank.grads_local},
                        grads_final={key: Grad(value) for key in rank.grads_local},
                        buffered=frozenset(rank.grads_local if buffered else ()),
                    )
                    for rank in outcome.ranks
                ),
            )

        original = simulate_experts(own)
        for value, buffered in ((None, False), (None, True), (torch.zeros(2), True)):
            assert judged(original, frozen, ended(value, buffered)).pairs
        words = "has a gradient of zeros instead of None, and had none when it was frozen, after"
        with pytest.raises(WrongGradient, match=words):
            judged(original, frozen, ended(torch.zeros(2), False))
        with pytest.raises(WrongGradient, match="has a gradient instead of None after finishing"):
            judged(original, frozen, ended(torch.ones(2), True))

    def test_every_step_is_compared(self) -> None:
        """What a later step ends with counts, and not what it has before that."""
        own = own_workload()
        (twin,) = determinism.twice(replace(own, likened="quick"))
        original, two_steps = simulate_experts(own), simulate_experts(twin.workload)

        def ended(last: Mapping[ParameterKey, Grad] | None) -> Outcome:
            ranks = tuple(
                replace(
                    now,
                    earlier=(Finish(was.grads_local, was.grads_final, None),),
                    grads_final=was.grads_final if last is None else last,
                )
                for was, now in zip(original.ranks, two_steps.ranks, strict=True)
            )
            return replace(two_steps, ranks=ranks)

        assert judged(original, twin, ended(None)).elements
        with pytest.raises(WrongGradient, match="after finishing step 1 is missing; it exists in the original run"):
            judged(original, twin, ended({}))

    def test_microbatches_add_up(self) -> None:
        """The sum over microbatches is that of each alone; of one of them it is not."""
        own = own_workload(microbatches=2)
        twins = laws.alone(own)
        ran = [Ran(twin, simulate_experts(twin.workload)) for twin in twins]
        tally = Tally()
        judge_sum(read(simulate_experts(own)), ran, tally)
        assert tally.elements
        with pytest.raises(WrongGradient, match="is not the sum"):
            judge_sum(read(simulate_experts(own)), [ran[0], ran[0]], Tally())
