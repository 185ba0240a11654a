"""Balancing by quantiles, worked out twice: reference.balance_bias.quantiles sorts, the longhand counts (BIAS-12)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.balance_bias import quantiles as first
from self_tests.chapters.balance_bias import second
from self_tests.chapters.losses.test_pair_refusals import refused

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Step(NamedTuple):
    """Scores of every part of a step with their masks, the bias of the step, and K."""

    parts: list[Floats]
    masks: list[Bools | None]
    bias: list[float]
    slots: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Scores and biases in eighths, so that differences are exact and tie often, or any; parts with nothing."""
    E = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    exact = draw(st.booleans())
    parts, masks = [], []
    for _ in range(draw(st.integers(0, 3))):
        T = draw(st.sampled_from([0, 1, 2, 5]))
        scores_TE = random.integers(0, 8, size=(T, E)) / 8.0 if exact else random.random((T, E))
        mask_T = None if draw(st.booleans()) else random.random(T) < draw(st.sampled_from([0.3, 1.0]))
        if mask_T is not None:
            scores_TE[mask_T] = draw(st.sampled_from([math.nan, math.inf, -9.0]))
        parts.append(scores_TE)
        masks.append(mask_T)
    bias = (random.integers(-4, 4, size=E) / 8.0 if exact else random.normal(size=E)).tolist()
    return Step(parts, masks, bias, draw(st.integers(1, E)))


def doubles(numbers: list[float]) -> Tensor:
    """Biases as the first oracle takes them."""
    return torch.tensor(numbers, dtype=torch.float64)


def first_bounds(step: Step, memory: float = 0.0) -> tuple[list[float], list[float]]:
    """Ask the first oracle between what the new bias may lie."""
    low_E, high_E = first.quantile_bounds(
        [torch.tensor(part) for part in step.parts],
        doubles(step.bias),
        top_k=step.slots,
        padding=[None if mask is None else torch.from_numpy(mask) for mask in step.masks],
        memory=memory,
    )
    assert (torch.float64, torch.float64) == (low_E.dtype, high_E.dtype)
    return low_E.tolist(), high_E.tolist()


class TestPair:
    @settings(pairs_agree, max_examples=200)
    @given(steps(), st.sampled_from([0.0, 0.0, 0.5, 0.9]))
    def test_bounds_agree(self, step: Step, memory: float) -> None:
        """Both allow every expert the same biases, with ties, shares that are not whole and ends that are open."""
        expected = second.legal_range(step.parts, step.bias, step.slots, step.masks, memory)
        assert expected[0] == pytest.approx(first_bounds(step, memory)[0], rel=1e-15, abs=1e-15)
        assert expected[1] == pytest.approx(first_bounds(step, memory)[1], rel=1e-15, abs=1e-15)

    @pairs_agree
    @given(st.integers(2, 6), st.integers(0, 4), st.integers(0, 10**6))
    def test_cutoffs_agree(self, E: int, T: int, seed: int) -> None:
        """Both find the best value that is left out, among ties too."""
        random = np.random.default_rng(seed)
        scores_TE, bias = random.integers(0, 5, size=(T, E)) / 4.0, (random.integers(-2, 2, size=E) / 4.0).tolist()
        for slots in range(1, E):
            cut_T = first.cutoffs(torch.tensor(scores_TE), doubles(bias), top_k=slots)
            assert torch.float64 == cut_T.dtype
            assert [second.cutoff(row, bias, slots) for row in scores_TE.tolist()] == cut_T.tolist()

    @pairs_agree
    @given(steps(), st.integers(0, 10**6))
    def test_distances_agree(self, step: Step, seed: int) -> None:
        """Both measure how far any bias is from its bounds, a common constant being free."""
        low, high = first_bounds(step)
        new = np.random.default_rng(seed).normal(size=len(low)).tolist()
        distance = first.outside(doubles(new), doubles(low), doubles(high))
        assert second.missed(new, low, high) == pytest.approx(distance, rel=1e-12, abs=1e-14)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_scores_are_widened_first(self, dtype: torch.dtype) -> None:
        """Scores and biases of fewer bits are taken as exact numbers and subtracted in float64."""
        generator = torch.Generator().manual_seed(3)
        scores_TE, bias_E = (
            torch.rand(5, 4, generator=generator).to(dtype),
            torch.tensor([0.1, 0.0, -0.3, 0.7]).to(dtype),
        )
        low_E, high_E = first.quantile_bounds([scores_TE], bias_E, top_k=2)
        expected = second.legal_range([scores_TE.double().numpy()], bias_E.double().tolist(), 2)
        assert expected == (low_E.tolist(), high_E.tolist())
        cut_T = first.cutoffs(scores_TE, bias_E, top_k=2)
        bias = bias_E.double().tolist()
        assert [second.cutoff(row, bias, 2) for row in scores_TE.double().tolist()] == cut_T.tolist()


class TestByHand:
    # z = s - b of six tokens, b = (0, 1/2, -1/4); K = 1: cutoffs are the second highest.
    #   s  (1, 1/4, 1/8)   z (1, -1/4, 3/8)    a 3/8    d (5/8, -1/8, -1/4)
    #      (1/2, 3/4, 0)     (1/2, 1/4, 1/4)   a 1/4      (1/4, 1/2, -1/4)
    #      (3/4, 1, 1/4)     (3/4, 1/2, 1/2)   a 1/2      (1/4, 1/2, -1/4)
    #      (0, 1/2, 1)       (0, 0, 5/4)       a 0        (0, 1/2, 1)
    SCORES = ((1.0, 0.25, 0.125), (0.5, 0.75, 0.0), (0.75, 1.0, 0.25), (0.0, 0.5, 1.0))
    BIAS = (0.0, 0.5, -0.25)

    def both(self, tokens: int, **options: float) -> tuple[list[float], list[float]]:
        """Bounds of both oracles for the first tokens of the table, which must be the same."""
        scores_TE, bias = np.array(self.SCORES[:tokens]), list(self.BIAS)
        low_E, high_E = first.quantile_bounds([torch.tensor(scores_TE)], doubles(bias), top_k=1, **options)
        assert second.legal_range([scores_TE], bias, 1, **options) == (low_E.tolist(), high_E.tolist())
        return low_E.tolist(), high_E.tolist()

    def test_cutoffs(self) -> None:
        """The second highest of each row; for K = 2 the lowest."""
        scores_TE, bias_E = torch.tensor(self.SCORES), doubles(list(self.BIAS))
        assert [0.375, 0.25, 0.5, 0.0] == first.cutoffs(scores_TE, bias_E, top_k=1).tolist()
        assert [-0.25, 0.25, 0.5, 0.0] == first.cutoffs(scores_TE, bias_E, top_k=2).tolist()
        assert [0.375, 0.25, 0.5, 0.0] == [second.cutoff(row, self.BIAS, 1) for row in self.SCORES]

    def test_a_whole_share(self) -> None:
        """Three tokens, one each: between the second and the first of d, for one expert a tie."""
        # d_0: 5/8 1/4 1/4; d_1: 1/2 1/2 -1/8; d_2: -1/4 three times.
        assert ([0.25, 0.5, -0.25], [0.625, 0.5, -0.25]) == self.both(3)

    def test_a_broken_share(self) -> None:
        """Four tokens, 4/3 each: one or two are legal, so between the third and the first of d."""
        # d_0: 5/8 1/4 1/4 0; d_1: 1/2 1/2 1/2 -1/8; d_2: 1 -1/4 -1/4 -1/4.
        assert ([0.25, 0.5, -0.25], [0.625, 0.5, 1.0]) == self.both(4)

    def test_a_share_below_one(self) -> None:
        """Two tokens, 2/3 each: none or one is legal, so anything above the second of d; of one, anything."""
        # d_0: 5/8 1/4; d_1: 1/2 -1/8; d_2: -1/4 -1/4.
        assert ([0.25, -0.125, -0.25], [math.inf] * 3) == self.both(2)
        assert ([-math.inf] * 3, [math.inf] * 3) == self.both(1)

    def test_memory_keeps_a_part_of_the_old_bias(self) -> None:
        """With r = 1/4 both ends are a quarter of the old bias and three quarters of the new one."""
        # low: 0 + 3/16; 1/8 + 3/8; -1/16 - 3/16. high: 15/32; the others the same.
        assert ([0.1875, 0.5, -0.25], [0.46875, 0.5, -0.25]) == self.both(3, memory=0.25)

    def test_nothing_to_balance(self) -> None:
        """No token, none but padding, or as many slots as experts: the bias stays."""
        bias, scores_TE = list(self.BIAS), np.array(self.SCORES)
        everything = np.ones(4, dtype=np.bool_)
        for step in (
            Step([], [], bias, 1),
            Step([scores_TE], [everything], bias, 1),
            Step([scores_TE], [None], bias, 3),
        ):
            assert (bias, bias) == first_bounds(step, 0.5)
            assert (bias, bias) == second.legal_range(step.parts, bias, step.slots, step.masks, 0.5)

    def test_distance(self) -> None:
        """Bounds [0, 1] and [2, 3]: what is between after a shift is legal, what is not misses by half the rest."""
        # b' = (5, 7): gap 2, legal. (5, 8.5): gap 3.5 of at most 3: 1/4. (5, 5.5): gap 1/2 of at least 1: 1/4.
        low, high = [0.0, 2.0], [1.0, 3.0]
        for new, expected in [([5.0, 7.0], 0.0), ([5.0, 8.0], 0.0), ([5.0, 8.5], 0.25), ([5.0, 5.5], 0.25)]:
            assert expected == first.outside(doubles(new), doubles(low), doubles(high))
            assert expected == second.missed(new, low, high)
        open_low, open_high = [-math.inf, 2.0], [math.inf, 3.0]
        assert 0.0 == first.outside(doubles([9.0, -9.0]), doubles(open_low), doubles(open_high))
        assert 0.0 == second.missed([9.0, -9.0], open_low, open_high)


class TestRefusals:
    @pytest.mark.parametrize(
        ("parts", "masks", "slots", "memory"),
        [
            ([np.zeros((2, 3))], None, 0, 0.0),
            ([np.zeros((2, 3))], None, 4, 0.0),
            ([np.zeros((2, 3))], None, 1, 1.0),
            ([np.zeros((2, 3))], None, 1, -0.1),
            ([np.zeros((2, 3))], None, 1, math.nan),
            ([np.zeros((2, 4))], None, 1, 0.0),
            ([np.zeros((2, 3)), np.zeros((1, 2))], None, 1, 0.0),
            ([np.array([[0.0, math.nan, 0.0]])], None, 1, 0.0),
            ([np.array([[0.0, -math.inf, 0.0]])], None, 1, 0.0),
            ([np.zeros((2, 3))], [None, None], 1, 0.0),
            ([np.zeros((2, 3))], [np.array([True])], 1, 0.0),
            ([np.zeros((2, 3))], [np.array([0, 1])], 1, 0.0),
        ],
    )
    def test_of_bounds(self, parts: list[Floats], masks: list[Bools | None] | None, slots: int, memory: float) -> None:
        """Slots or a memory that there are not, scores without order or of other shapes, masks that do not fit."""
        tensors = [torch.tensor(part) for part in parts]
        padding = None if masks is None else [None if mask is None else torch.from_numpy(mask) for mask in masks]
        bias = [0.0, 0.5, -0.25]
        assert refused(
            lambda: first.quantile_bounds(tensors, doubles(bias), top_k=slots, padding=padding, memory=memory)
        )
        assert refused(lambda: second.legal_range(parts, bias, slots, masks, memory))

    @pytest.mark.parametrize(("tokens", "slots"), [(2, 3), (0, 1)])
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_of_a_bias_that_nothing_moves(self, tokens: int, slots: int, value: float) -> None:
        """K = E, or no token, would hand the bias on as it is: it has to be finite all the same."""
        scores_TE, bias = np.zeros((tokens, 3)), [0.0, value, 0.0]
        assert refused(lambda: first.quantile_bounds([torch.tensor(scores_TE)], doubles(bias), top_k=slots))
        assert refused(lambda: second.legal_range([scores_TE], bias, slots))

    @pytest.mark.parametrize(
        ("scores", "bias", "slots"),
        [
            ([0.0, 1.0, 2.0], [0.0, 0.0, 0.0], 0),
            ([0.0, 1.0, 2.0], [0.0, 0.0, 0.0], 3),
            ([0.0, 1.0, 2.0], [0.0, 0.0], 1),
            ([0.0, 1.0, math.nan], [0.0, 0.0, 0.0], 1),
            ([0.0, 1.0, -math.inf], [0.0, 0.0, 0.0], 1),
            ([0.0, 1.0, 2.0], [0.0, math.inf, 0.0], 1),
        ],
    )
    def test_of_cutoffs(self, scores: list[float], bias: list[float], slots: int) -> None:
        """No best expert left out, or numbers that have no order."""
        assert refused(lambda: first.cutoffs(doubles(scores)[None, :], doubles(bias), top_k=slots))
        assert refused(lambda: second.cutoff(scores, bias, slots))

    @pytest.mark.parametrize(
        ("new", "low", "high"),
        [
            ([0.0, math.nan], [0.0, 0.0], [1.0, 1.0]),
            ([0.0, math.inf], [0.0, 0.0], [1.0, math.inf]),
            ([0.0], [0.0, 0.0], [1.0, 1.0]),
            ([0.0, 0.0], [0.0, 2.0], [1.0, 1.0]),
        ],
    )
    def test_of_distances(self, new: list[float], low: list[float], high: list[float]) -> None:
        """A bias that is not finite, bounds of other shapes or the wrong way round."""
        assert refused(lambda: first.outside(doubles(new), doubles(low), doubles(high)))
        assert refused(lambda: second.missed(new, low, high))
