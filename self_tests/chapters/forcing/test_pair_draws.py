"""Forced draws, worked out twice: reference.forcing.draws, and the longhand in whole numbers."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.forcing import draws as first
from self_tests.chapters.forcing.second import draws as second
from self_tests.oracles.asked_twice import assert_agree
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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
        off = random.choice([0, 5, math.floor(first.load_margin(tokens, top_k, experts)) + random.integers(-1, 3)])  # type: ignore[arg-type]
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


class TestBiasDraws:
    @settings(pairs_agree, max_examples=120)
    @given(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=3), st.integers(0, 10**6))
    def test_choices_agree(self, sizes: list[int], seed: int) -> None:
        """Both see the same tokens choose alike."""
        random = np.random.default_rng(seed)
        ids = [np.array([random.permutation(3)[:2] for _ in range(T)], dtype=int).reshape(T, 2) for T in sizes]
        assert_agree(first.one_choice, second.one_choice, ids)

    def test_chances(self) -> None:
        """Both give the same chance that all draws agree."""
        for draws, top_k, more in product((0, 1, 15), (1, 2, 4), (0, 1, 3)):
            chance = first.chance_alike(draws, top_k, top_k + more)
            assert second.chance_alike(draws, top_k, top_k + more) == pytest.approx(chance, rel=1e-13)


test_by_hand = by_hand(
    *rows(first.load_margin, second.load_margin,
        *((f"margin of T, K, E = {sizes}", sizes, REFUSED) for sizes in [(-1, 1, 2), (1, 0, 2), (1, 3, 2)]),
    ),
    # At most seven standard deviations and 16 off the mean.
    *rows(lambda loads, top_k: first.legal_random_loads(torch.tensor(loads), top_k), second.legal_random_loads,
        ("T = 400, E = 2: sigma = 10, so 200 -+ 86", ([286, 114], 1), [True, True]),
        ("T = 400, E = 2: 87 off", ([287, 113], 1), [False, False]),
        ("T = 225, K = 4 of 5: 58 off is legal to the last bit", ([122, 195, 195, 194, 194], 4), [True] * 5),
        ("T = 225, K = 4 of 5: 59 off", ([121, 195, 195, 195, 194], 4), [False] + [True] * 4),
        ("K = E: exactly T", ([7, 7, 7], 3), [True] * 3),
        ("K = E: not T", ([8, 7, 6], 3), [False, True, False]),
        ("T = 0", ([0, 0, 0], 2), [True] * 3),
        ("12 off: few tokens may well meet", ([16, 0, 0, 0], 1), [True] * 4),
        *((f"loads 2 1 of K = {K}", ([2, 1], K), REFUSED) for K in (0, 2, 3)),
    ),
    *rows(first.bias_moment, second.bias_moment,
        # Means 2, -2, 0 of two tokens and 1, 1, 1 of two more.
        ("(4 + 4 + 0 + 3) / 6", ([np.array([[1.0, -2, 5], [3, -2, -5]]), np.ones((2, 3))],), 11 / 6),
        ("moment of none", ([],), REFUSED),
        ("moment of T = 0", ([np.zeros((0, 3))],), REFUSED),
        ("moment of two shapes", ([np.zeros((1, 3)), np.zeros((2, 3))],), REFUSED),
    ),
    *rows(first.bias_moment_bounds, second.bias_moment_bounds,
        ("v = -3: 9 1/4 (1 -+ 8 sqrt(2 / 512))", (-3.0, 4, 64, 8), (4.625, 13.875)),
        ("a moment is not below 0", (3.0, 4, 2, 16), (0.0, 27.75)),
        *(
            (f"bounds of {sizes}", sizes, REFUSED)
            for sizes in [(1.0, 0, 2, 3), (1.0, 2, 0, 3), (1.0, 2, 3, 0), (math.nan, 2, 3, 4)]
        ),
    ),
    *rows(first.chance_alike, second.chance_alike,
        ("of six pairs two more draws hit the first one's with 1 / 36", (2, 2, 4), 1 / 36),
        *((f"chance of {sizes}", sizes, REFUSED) for sizes in [(-1, 1, 2), (1, 0, 2), (1, 3, 2)]),
    ),
)  # fmt: skip
