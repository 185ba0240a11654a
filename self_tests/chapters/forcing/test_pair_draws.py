"""Forced draws, worked out twice: reference.forcing.draws, and the longhand in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.forcing import draws as first
from self_tests.chapters.forcing.second import draws as second
from self_tests.oracles.asked_twice import assert_agree, assert_refused

Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class TestDraws:
    @pairs_agree
    @given(st.integers(0, 500), st.integers(1, 9), st.integers(0, 9))
    def test_margins_agree(self, tokens: int, top_k: int, more: int) -> None:
        """Both allow the same distance from the mean."""
        sizes = (tokens, top_k, top_k + more)
        assert second.load_margin(*sizes) == pytest.approx(first.load_margin(*sizes), rel=1e-14)

    @settings(pairs_agree, max_examples=200)
    @given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 400), st.integers(0, 10**6))
    def test_loads_agree(self, experts: int, top_k: int, tokens: int, seed: int) -> None:
        """Both accept the same loads, those at the margin and beside it included."""
        top_k = min(top_k, experts)
        random = np.random.default_rng(seed)
        off = random.choice([0, 5, math.floor(first.load_margin(tokens, top_k, experts)) + random.integers(-1, 3)])
        loads_E = np.full(experts, tokens * top_k // experts)
        loads_E[random.integers(experts)] += off * random.choice([-1, 1])
        loads_E = np.maximum(loads_E, 0)
        loads_E[0] += -loads_E.sum() % top_k
        assert_agree(
            first.legal_random_loads,
            lambda n_E, k: second.legal_random_loads(n_E.tolist(), k),
            loads_E,
            top_k,
        )

    @pytest.mark.parametrize(
        ("loads", "top_k", "expected"),
        [
            # T = 400, E = 2: sigma = 10, so 200 -+ 86.
            ([286, 114], 1, [True, True]),
            ([287, 113], 1, [False, False]),
            # T = 225, K = 4 of 5: sigma^2 = 36, so 180 -+ 58; 58 off is legal to the last bit.
            ([122, 195, 195, 194, 194], 4, [True] * 5),
            ([121, 195, 195, 195, 194], 4, [False] + [True] * 4),
            ([7, 7, 7], 3, [True] * 3),
            ([8, 7, 6], 3, [False, True, False]),  # K = E: exactly T
            ([0, 0, 0], 2, [True] * 3),
            ([16, 0, 0, 0], 1, [True] * 4),  # 12 off: few tokens may well meet
        ],
    )
    def test_loads_by_hand(self, loads: list[int], top_k: int, expected: list[bool]) -> None:
        """At most seven standard deviations and 16 off the mean."""
        assert expected == second.legal_random_loads(loads, top_k)
        assert expected == first.legal_random_loads(torch.tensor(loads), top_k).tolist()

    def test_honest_draws_are_legal(self) -> None:
        """Loads of random logits and moments of biased ones lie within their bounds, and those of others do not."""
        generator = torch.Generator().manual_seed(3)
        z_TE = torch.randn(600, 8, generator=generator, dtype=torch.float64)
        loads_E = torch.bincount(z_TE.topk(3, dim=1).indices.flatten(), minlength=8)
        assert bool(first.legal_random_loads(loads_E, 3).all())
        skewed_E = torch.bincount((z_TE + torch.arange(8) / 5).topk(3, dim=1).indices.flatten(), minlength=8)
        assert not bool(first.legal_random_loads(skewed_E, 3).all())
        for v, legal in [(0.5, True), (-0.5, True), (1.5, False), (0.0, False)]:
            draws = [
                0.5 * torch.randn(1, 64, generator=generator) + torch.randn(9, 64, generator=generator)
                for _ in range(16)
            ]
            low, high = first.bias_moment_bounds(v, 9, 64, 16)
            assert legal is (low <= first.bias_moment(draws) <= high)

    @pairs_agree
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.floats(-3, 3), st.integers(0, 10**6))
    def test_moments_agree(self, tokens: int, experts: int, draws: int, deviation: float, seed: int) -> None:
        """Both measure the same moment, and bound it alike."""
        logits = list(np.random.default_rng(seed).normal(size=(draws, tokens, experts)))
        found = first.bias_moment([torch.from_numpy(logits_TE) for logits_TE in logits])
        assert second.bias_moment(logits) == pytest.approx(found, rel=1e-12)
        for many in (draws, 200 * draws):
            sizes = (deviation, tokens, experts, many)
            assert second.bias_moment_bounds(*sizes) == pytest.approx(first.bias_moment_bounds(*sizes))

    def test_moments_by_hand(self) -> None:
        """Means 2, -2, 0 of two tokens and 1, 1, 1 of two more: (4 + 4 + 0 + 3) / 6."""
        # Bounds for v = -3, T = 4, E = 64, 8 draws: 9 1/4 (1 -+ 8 sqrt(2 / 512)) = 9 1/4 (1 -+ 1/2).
        draws = [np.array([[1.0, -2.0, 5.0], [3.0, -2.0, -5.0]]), np.ones((2, 3))]
        assert 11 / 6 == pytest.approx(second.bias_moment(draws))
        assert 11 / 6 == pytest.approx(first.bias_moment([torch.from_numpy(z_TE) for z_TE in draws]))
        for oracle in (first, second):
            assert (4.625, 13.875) == pytest.approx(oracle.bias_moment_bounds(-3.0, 4, 64, 8))
            assert (0.0, 27.75) == pytest.approx(oracle.bias_moment_bounds(3.0, 4, 2, 16))


class TestBiasDraws:
    @settings(pairs_agree, max_examples=120)
    @given(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=3), st.integers(0, 10**6))
    def test_choices_agree(self, sizes: list[int], seed: int) -> None:
        """Both see the same tokens choose alike."""
        random = np.random.default_rng(seed)
        ids = [np.array([random.permutation(3)[:2] for _ in range(T)], dtype=int).reshape(T, 2) for T in sizes]
        assert_agree(first.one_choice, second.one_choice, ids)

    def test_chances(self) -> None:
        """Of six pairs among four, two more draws hit the first one's with chance 1 / 36."""
        assert 1 / 36 == pytest.approx(first.chance_alike(2, 2, 4), rel=1e-15)
        for draws, top_k, more in product((0, 1, 15), (1, 2, 4), (0, 1, 3)):
            chance = first.chance_alike(draws, top_k, top_k + more)
            assert second.chance_alike(draws, top_k, top_k + more) == pytest.approx(chance, rel=1e-13)


BAD: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "margin T < 0": (first.load_margin, second.load_margin, (-1, 1, 2)),
    "margin K = 0": (first.load_margin, second.load_margin, (1, 0, 2)),
    "margin K > E": (first.load_margin, second.load_margin, (1, 3, 2)),
    "loads of no T": (first.legal_random_loads, second.legal_random_loads, (np.array([2, 1]), 2)),
    "loads of K = 0": (first.legal_random_loads, second.legal_random_loads, (np.array([2, 1]), 0)),
    "loads of K > E": (first.legal_random_loads, second.legal_random_loads, (np.array([2, 1]), 3)),
    "moment of none": (first.bias_moment, second.bias_moment, ([],)),
    "moment T = 0": (first.bias_moment, second.bias_moment, ([np.zeros((0, 3))],)),
    "moment of two shapes": (
        first.bias_moment,
        second.bias_moment,
        ([np.zeros((1, 3)), np.zeros((2, 3))],),
    ),
    **{
        f"bounds of {sizes}": (first.bias_moment_bounds, second.bias_moment_bounds, sizes)
        for sizes in [(1.0, 0, 2, 3), (1.0, 2, 0, 3), (1.0, 2, 3, 0), (math.nan, 2, 3, 4)]
    },
    "chance of -1": (first.chance_alike, second.chance_alike, (-1, 1, 2)),
    "chance of K = 0": (first.chance_alike, second.chance_alike, (1, 0, 2)),
    "chance of K > E": (first.chance_alike, second.chance_alike, (1, 3, 2)),
}


class TestRefusals:
    """What has no answer is refused by both."""

    @pytest.mark.parametrize("name", BAD)
    def test_refused(self, name: str) -> None:
        """A question without an answer raises in both oracles."""
        one, other, question = BAD[name]
        assert_refused(one, other, *question)
