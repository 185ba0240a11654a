"""Checkpoints, worked out twice: the first cuts and joins tensors, the longhand copies bit by bit to addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.reference import experts
from moe_conformance.reference.checkpoints import parts as first
from moe_conformance.reference.checkpoints import upcycling
from moe_conformance.reference.checkpoints.layouts import Layout, coordinates
from moe_conformance.reference.exchange import layer
from self_tests.chapters.checkpoints.second import parts as second
from self_tests.chapters.checkpoints.second import upcycling as second_upcycling
from self_tests.chapters.experts.second import SwiGLU
from self_tests.oracles.agreement import assert_close, check_refused, floats
from self_tests.oracles.bits import PATTERNS, Bits, numbers, patterns, spelled

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

Key = tuple[str, int]
E, D = 6, 2
dtypes = st.sampled_from(list(PATTERNS))


def tensors(held: Mapping[Key, Bits], dtype: torch.dtype) -> dict[Key, Tensor]:
    """Patterns as the numbers that the first oracle moves."""
    return {key: numbers(bits, dtype) for key, bits in held.items()}


def assert_same(expected: Mapping[Key, Bits], actual: Mapping[Key, Tensor], dtype: torch.dtype) -> None:
    """The same keys, and under each the same dtype, shape and bits."""
    assert set(expected) == set(actual)
    for key, bits in expected.items():
        assert (dtype, bits.shape) == (actual[key].dtype, tuple(actual[key].shape))
        assert bits.tolist() == spelled(actual[key]).tolist()


@st.composite
def layouts(draw: st.DrawFn) -> second.Layout:
    """One to three ranks along ep, one to three parts, one or two replicas; experts in runs or dealt unevenly."""
    ep, etp, edp = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    if draw(st.booleans()):
        return second.in_runs(ep * etp * edp, ep, etp, E)
    dealt: list[list[int]] = [[] for _ in range(ep)]
    for expert in draw(st.permutations(range(E))):
        dealt[draw(st.integers(0, ep - 1))].append(expert)
    return second.Layout(ep * etp * edp, ep, etp, dealt)


def layout_of(layout: second.Layout) -> Layout:
    """The same for the first oracle."""
    return Layout(layout.world, layout.ep, layout.etp, E, tuple(map(tuple, layout.dealt)))


def whole_of(seed: int, units: int = 6, absent: Sequence[int] = ()) -> dict[Key, Bits]:
    """All parameters of all experts, a bias and a scalar that etp does not cut; what is absent has no state."""
    random = np.random.default_rng(seed)
    shapes = {"gate": (units, D), "up": (units, D), "down": (D, units), "bias": (D,), "scale": ()}
    return {(name, e): patterns(random, shape) for e in range(E) if e not in absent for name, shape in shapes.items()}


class Saved(NamedTuple):
    """What every rank of a layout holds, as patterns."""

    layout: second.Layout
    ranks: list[dict[Key, Bits]]


class TestLayoutPair:
    @pairs_agree
    @given(layouts(), st.sampled_from([6, 0]), st.sets(st.integers(0, E - 1), max_size=2), dtypes, st.integers(0, 99))
    def test_parts_of_ranks_agree(
        self, layout: second.Layout, units: int, absent: set[int], dtype: torch.dtype, seed: int
    ) -> None:
        """Both give every rank the same parts of the same experts, and put them together to the bits that were."""
        whole = whole_of(seed, units, sorted(absent))
        by_hand, made = second.dealt_out(whole, layout), first.shard(tensors(whole, dtype), layout_of(layout))
        for expected, actual in zip(by_hand, made, strict=True):
            assert_same(expected, actual, dtype)
        assert_same(whole, first.assemble(made, layout_of(layout)), dtype)
        assert_same(second.gathered(by_hand, layout), tensors(whole, dtype), dtype)

    @pairs_agree
    @given(layouts(), layouts(), dtypes, st.integers(0, 99))
    def test_moving_to_another_layout_agrees(
        self, before: second.Layout, after: second.Layout, dtype: torch.dtype, seed: int
    ) -> None:
        """Saved by one layout, loaded by another: each rank holds what the addresses say; and back is the identity."""
        whole = whole_of(seed)
        saved = [tensors(held, dtype) for held in second.dealt_out(whole, before)]
        loaded = first.reshard(saved, layout_of(before), layout_of(after))
        for expected, actual in zip(second.dealt_out(whole, after), loaded, strict=True):
            assert_same(expected, actual, dtype)
        again = first.reshard(loaded, layout_of(after), layout_of(before))
        for expected, actual in zip(second.dealt_out(whole, before), again, strict=True):
            assert_same(expected, actual, dtype)

    @pairs_agree
    @given(layouts(), st.integers(0, 99), st.data())
    def test_faults_of_ranks_are_seen_alike(self, layout: second.Layout, seed: int, data: st.DataObject) -> None:
        """One bit, one name, one expert or one rank wrong: both refuse, or both have the same answer."""
        saved = Saved(layout, second.dealt_out(whole_of(seed), layout))
        rank = data.draw(st.integers(0, layout.world - 1))
        held = saved.ranks[rank]
        fault = data.draw(st.sampled_from(["bit", "sign of zero", "lost", "foreign", "rank"]))
        if fault == "rank":
            saved.ranks.pop()
        elif fault == "foreign":
            held["gate", data.draw(st.integers(0, E))] = np.zeros((6 // layout.etp, D), dtype=np.int64)
        elif held:
            key = data.draw(st.sampled_from(sorted(held)))
            if fault == "lost":
                del held[key]
            else:
                held[key].flat[-1] ^= 1 if fault == "bit" else -0x8000
        first_ranks = [tensors(each, torch.float32) for each in saved.ranks]
        try:
            expected = second.gathered(saved.ranks, layout)
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                first.assemble(first_ranks, layout_of(layout))
        else:
            assert_same(expected, first.assemble(first_ranks, layout_of(layout)), torch.float32)

    @pytest.mark.parametrize("expert", [3, E])
    def test_an_expert_of_another_rank_is_refused(self, expert: int) -> None:
        """All ranks of one place hold, with equal bits, an expert that is dealt to the other place, or to none."""
        layout = second.in_runs(4, 2, 1, E)
        ranks = second.dealt_out(whole_of(1), layout)
        for rank in (0, 2):
            ranks[rank]["gate", expert] = np.zeros((6, D), dtype=np.int64)
        check_refused(
            lambda: first.assemble([tensors(held, torch.float32) for held in ranks], layout_of(layout)),
            lambda: second.gathered(ranks, layout),
        )

    @pairs_agree
    @given(layouts())
    def test_holders_agree(self, layout: second.Layout) -> None:
        """Etp varies fastest in a rank's number, then ep: both place every element of an expert on the same ranks."""
        for rank in range(layout.world):
            at_etp, at_ep, _ = coordinates(rank, layout_of(layout))
            for expert in range(E):
                place = second.holds(rank, ("gate", expert), (at_etp, 0), (layout.etp, 1), layout)
                assert (expert in layout_of(layout).held()[at_ep]) == (place == (0, 0))

    def test_layouts_that_do_not_fit_are_refused(self) -> None:
        """Ranks left over, sizes of nothing, experts lost, twice, unknown, or places lost."""
        for world, ep, etp, dealt in [
            (6, 2, 2, [[0, 1, 2], [3, 4, 5]]), (0, 1, 1, [list(range(E))]), (2, 2, 0, [[0, 1, 2], [3, 4, 5]]),
            (2, 2, 1, [[0, 1, 2], [3, 4]]), (2, 2, 1, [[0, 1, 2, 3], [3, 4, 5]]), (2, 2, 1, [list(range(E))]),
            (1, 1, 1, [list(range(1, E + 1))]), (-1, 1, 1, [list(range(E))]),
        ]:  # fmt: skip
            layout = second.Layout(world, ep, etp, dealt)
            check_refused(
                lambda layout=layout: layout_of(layout),  # type: ignore[misc]
                lambda layout=layout: second.must_be_filled(layout, E),  # type: ignore[misc]
            )
        with pytest.raises(ValueError, match="ep does not divide"):
            Layout(4, ep=4, etp=1, experts=E)
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=f"rank {rank}"):
                coordinates(rank, Layout(4, ep=2, etp=1, experts=E))

    def test_what_cannot_be_dealt_out_is_refused(self) -> None:
        """Five hidden units for two parts; an expert that the layout does not know; other experts after than before."""
        layout = second.in_runs(2, 1, 2, E)
        for whole in ({("down", 0): np.zeros((D, 5), dtype=np.int64)}, {("bias", E): np.zeros(D, dtype=np.int64)}):
            check_refused(
                lambda whole=whole: first.shard(tensors(whole, torch.float64), layout_of(layout)),  # type: ignore[misc]
                lambda whole=whole: second.dealt_out(whole, layout),  # type: ignore[misc]
            )
        with pytest.raises(ValueError, match="experts"):
            first.reshard([{}], Layout(1, 1, 1, 2), Layout(1, 1, 1, 3))

    def test_parts_of_unequal_shape_are_refused(self) -> None:
        """One rank's part is wider, or has another dtype, than the other's."""
        layout = second.in_runs(2, 1, 2, E)
        for name, shapes in [("gate", [(3, D), (3, D + 1)]), ("down", [(D, 3), (D, 4)])]:
            ranks = [{(name, 0): np.zeros(shape, dtype=np.int64)} for shape in shapes]
            check_refused(
                lambda ranks=ranks: first.assemble([tensors(held, torch.float64) for held in ranks], layout_of(layout)),  # type: ignore[misc]
                lambda ranks=ranks: second.gathered(ranks, layout),  # type: ignore[misc]
            )
        mixed = [{("gate", 0): torch.zeros(2, D, dtype=dtype)} for dtype in (torch.float32, torch.bfloat16)]
        with pytest.raises(ValueError, match=r"."):
            first.assemble(mixed, layout_of(layout))


class TestAgreement:
    @pairs_agree
    @given(st.integers(1, 3), st.sampled_from([(), (0,), (4,), (2, 3)]), st.integers(0, 3), dtypes, st.integers(0, 99))
    def test_the_value_of_all_ranks(
        self, ranks: int, shape: tuple[int, ...], bit: int, dtype: torch.dtype, seed: int
    ) -> None:
        """NaN agrees with itself; a single bit, the sign of zero included, does not."""
        bits = patterns(np.random.default_rng(seed), shape)
        values = [bits.copy() for _ in range(ranks)]
        assert bits.tolist() == second.agreed(values).tolist()
        assert bits.tolist() == spelled(first.agreed([numbers(value, dtype) for value in values])).tolist()
        if ranks > 1 and bits.size:
            values[-1].flat[-1] ^= [1, 0x40, 0x3F80, -0x8000][bit]
            check_refused(
                lambda: first.agreed([numbers(value, dtype) for value in values]), lambda: second.agreed(values)
            )

    def test_nothing_agrees_with_nothing(self) -> None:
        """No rank, other shapes, other dtypes."""
        check_refused(lambda: first.agreed([]), lambda: second.agreed([]))
        one, row = np.zeros(2, dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
        check_refused(
            lambda: first.agreed([numbers(one, torch.float32), numbers(row, torch.float32)]),
            lambda: second.agreed([one, row]),
        )
        with pytest.raises(ValueError, match=r"."):
            first.agreed([torch.zeros(2), torch.zeros(2, dtype=torch.int32)])

    def test_memory_does_not_matter(self) -> None:
        """Values that lie apart in memory, or all in one place, are what they read as."""
        apart, together = torch.arange(6.0)[::2], torch.tensor(4.0).expand(3)
        assert [0.0, 2.0, 4.0] == first.agreed([apart, torch.tensor([0.0, 2.0, 4.0])]).tolist()
        assert [4.0, 4.0, 4.0] == first.agreed([together, torch.full((3,), 4.0)]).tolist()
        assert not first.same_bits(apart, together)


class TestUpcycling:
    @pairs_agree
    @given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), dtypes, st.integers(0, 99))
    def test_experts_agree(self, copies: int, pieces: int, size: int, dtype: torch.dtype, seed: int) -> None:
        """Both cut the dense MLP into the same pieces, piece after piece, copy after copy, bit for bit."""
        random, units = np.random.default_rng(seed), pieces * size
        dense = [patterns(random, shape) for shape in [(units, D), (units, D), (D, units)]]
        made = upcycling.upcycle(*(numbers(matrix, dtype) for matrix in dense), copies * pieces, pieces=pieces)  # type: ignore[arg-type, misc]
        assert_same(second_upcycling.upcycled(*dense, copies * pieces, pieces), made, dtype)  # type: ignore[arg-type, call-arg]

    @pairs_agree
    @given(st.integers(0, 3), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
    def test_copies_answer_what_the_dense_model_answers(self, T: int, K: int, to_one: bool, seed: int) -> None:
        """Whatever experts are chosen: the sum of the weights times the dense MLP, which itself for a sum of one."""
        random = np.random.default_rng(seed)
        dense = SwiGLU(*(random.normal(size=size) for size in [(4, D), (4, D), (D, 4)]))
        x_TD, weights_TK = random.normal(size=(T, D)), random.random(size=(T, K))
        if to_one:
            weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        expected = second_upcycling.upcycled_output(x_TD, weights_TK, dense)
        matrices = [floats(matrix) for matrix in dense]
        assert_close(expected, upcycling.upcycled_output(floats(x_TD), floats(weights_TK), *matrices))
        held = upcycling.upcycle(*matrices, E)  # type: ignore[arg-type, call-arg]
        ids = torch.from_numpy(random.integers(0, E, size=(T, K)))
        assert_close(expected, layer.forward(floats(x_TD), ids, floats(weights_TK), experts.swiglu_experts(held)))
        if to_one:
            assert_close(expected, experts.swiglu(floats(x_TD), *matrices))

    def test_what_does_not_divide_is_refused(self) -> None:
        """No expert, no piece, experts or hidden units that are no whole number of pieces, weights of other tokens."""
        dense = [np.zeros(shape, dtype=np.int64) for shape in [(6, D), (6, D), (D, 6)]]
        for number, pieces in [(0, 1), (3, 2), (4, 4), (3, 0), (-2, 1)]:
            check_refused(
                lambda number=number, pieces=pieces: upcycling.upcycle(  # type: ignore[misc]
                    *(numbers(matrix, torch.float32) for matrix in dense),  # type: ignore[arg-type]
                    number,
                    pieces=pieces,
                ),
                lambda number=number, pieces=pieces: second_upcycling.upcycled(*dense, number, pieces),  # type: ignore[arg-type, call-arg, misc]
            )
        with pytest.raises(ValueError, match="tokens"):
            upcycling.upcycled_output(torch.ones(2, 1), torch.ones(1, 1), *(torch.ones(1, 1) for _ in range(3)))


class TestMoving:
    @pairs_agree
    @given(st.lists(st.integers(0, 2), max_size=6), dtypes, st.integers(0, 99))
    def test_places_and_loads_agree(self, extra: list[int], dtype: torch.dtype, seed: int) -> None:
        """Every place holds what its expert had, and an expert's load is that of all its places."""
        random = np.random.default_rng(seed)
        expert_of_place = [int(e) for e in random.permutation([0, 1, 2, *extra])]
        whole = {(name, e): patterns(random, (2, D)) for e in range(3) for name in ("gate", "up")}
        made = upcycling.at_places(tensors(whole, dtype), expert_of_place)
        assert_same(second_upcycling.at_places(whole, expert_of_place), made, dtype)
        loads = [int(load) for load in random.integers(0, 9, size=len(expert_of_place))]
        by_hand = second_upcycling.loads(loads, expert_of_place, 4)
        assert by_hand == list(upcycling.loads_by_expert(loads, expert_of_place, 4))
        assert (0, sum(loads)) == (by_hand[3], sum(by_hand))

    def test_bad_places_are_refused(self) -> None:
        """An expert without a place, a place without its expert, another number of loads, unknown experts."""
        whole = {("gate", e): np.full((1, 1), e, dtype=np.int64) for e in (0, 1)}
        for places in ([0, 0], [0, 1, 2], []):
            check_refused(
                lambda places=places: upcycling.at_places(tensors(whole, torch.float32), places),  # type: ignore[misc]
                lambda places=places: second_upcycling.at_places(whole, places),  # type: ignore[misc]
            )
        for loads, places in [([1], [0, 1]), ([1, 2], [0, 2]), ([1, 2], [0, -1])]:
            check_refused(
                lambda loads=loads, places=places: upcycling.loads_by_expert(loads, places, 2),  # type: ignore[misc]
                lambda loads=loads, places=places: second_upcycling.loads(loads, places, 2),  # type: ignore[misc]
            )
