"""Jitter, worked out twice: the logits that it gives, the factors that they show, and whether these are uniform."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.routing import jitter as first
from self_tests.chapters.routing.second import jitter as second
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
Floats = NDArray[np.float64]


def make_case(T: int, D: int, E: int, seed: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Input, factors, gate weight and upstream gradient."""
    random = np.random.default_rng(seed)
    factors_TD = random.uniform(0.75, 1.25, size=(T, D))
    return random.normal(size=(T, D)), factors_TD, random.normal(size=(E, D)), random.normal(size=(T, E))


cases = st.builds(make_case, st.integers(0, 3), st.integers(0, 5), st.integers(1, 4), st.integers(0, 10**6))


class TestLogits:
    @pairs_agree
    @given(cases)
    def test_logits_and_gradients_agree(self, case: tuple[Floats, ...]) -> None:
        """Both jitter what the gate reads, and the factor is in the gradients of x and of the weight."""
        leaves = [floats(array, leaf=True) for array in case[:3]]
        logits_TE = first.jittered_logits(*leaves)
        assert_close(second.jittered_logits(*case[:3]), logits_TE, addend=5.0)
        gradients = torch.autograd.grad(logits_TE, leaves, floats(case[3]))
        for expected, actual in zip(second.jittered_logits_backward(*case), gradients, strict=True):
            assert_close(expected, actual, addend=5.0)


class TestSeenFactors:
    @pairs_agree
    @given(st.integers(0, 10**6))
    def test_one_hot_rows_show_their_factors(self, seed: int) -> None:
        """A gate of ones and zeros shows each factor of the columns that it reads."""
        random = np.random.default_rng(seed)
        x_TD, factors_TD, _, _ = make_case(int(random.integers(0, 4)), 5, 1, seed)
        x_TD[:, 4] = 0.0  # nobody reads it
        columns = [int(column) for column in random.permutation(4)[: random.integers(1, 4)]]
        weight_ED = np.zeros((len(columns), 5))
        for e, column in enumerate(columns):
            weight_ED[e, column] = 1.0
        logits_TE = second.jittered_logits(x_TD, factors_TD, weight_ED)
        expected = second.seen_factors(logits_TE, x_TD, columns)
        actual = first.seen_factors(floats(logits_TE), floats(x_TD), columns)
        assert_close(expected, actual)
        assert_close(factors_TD[:, columns], actual)


class TestLegalFactors:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("eps", [1e-2, 0.5, 1.0])
    def test_rounded_jitter_is_legal(self, dtype: torch.dtype, eps: float) -> None:
        """Extreme factors, made and multiplied in few bits, stay within the bounds; twice as much does not."""
        unit = torch.finfo(dtype).eps / 2
        x = torch.linspace(1.0, 2.0, 97).to(dtype)
        for factor in (1 - eps, 1 + eps):
            seen = (x * torch.tensor(factor, dtype=dtype)).double() / x.double()
            assert bool(first.legal_factors(seen, eps, unit=unit).all())
        wider = (x * torch.tensor(1 + 1.1 * eps + 8 * unit, dtype=dtype)).double() / x.double()
        assert not bool(first.legal_factors(wider, eps, unit=unit).any())


class TestDeviations:
    @pairs_agree
    @given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([0.01, 0.3, 1.0]))
    def test_deviations_agree(self, T: int, N: int, seed: int, eps: float) -> None:
        """Both find the same four z-scores, none where there are no neighbours."""
        factors_TN = 1.0 + eps * np.random.default_rng(seed).uniform(-1.0, 1.0, size=(T, N))
        actual = first.deviations(floats(factors_TN), eps)
        assert list(second.deviations(factors_TN, eps)) == pytest.approx(list(actual), rel=1e-9, abs=1e-9)
        assert (T == 1, N == 1) == (actual.along_tokens == 0.0, actual.along_columns == 0.0)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda u: u, None),
            (lambda u: abs(u) - 0.1, "mean"),
            (lambda u: np.sign(u), "variance"),
            (lambda u: np.repeat(u[:1], len(u), axis=0), "along_tokens"),
            (lambda u: np.repeat(u[:, :1], 8, axis=1), "along_columns"),
        ],
    )
    def test_what_is_not_independent_and_uniform_shows(self, change: Callable[[Any], Any], field: str | None) -> None:
        """Uniform factors stay within 8; each other kind leaves it in its own number."""
        u = change(np.random.default_rng(3).uniform(-1.0, 1.0, size=(400, 8)))
        made = first.deviations(floats(1.0 + 0.1 * u), 0.1)
        found = {name for name, value in made._asdict().items() if abs(value) > 8.0}
        assert (set() if field is None else {field}) == found & ({field} if field else set(made._fields))


def of_ones(*shapes: tuple[int, int]) -> tuple[Floats, ...]:
    """Arrays of these shapes."""
    return tuple(np.ones(shape) for shape in shapes)


def beside(oracle: Any) -> Callable[[float, float, float], Any]:
    """Whether a factor is legal, beside one that is."""
    return lambda factor, eps, unit: oracle([1.0, factor], eps, unit)


UNIT, NEXT, INF, NAN = 2.0**-10, math.nextafter, math.inf, math.nan
HIGH, LOW = 1.25 + 4 * UNIT * 1.25, 0.75 - 4 * UNIT * 1.25  # all of it exact
# u = ((1, -1/2, 0), (1/2, 1, -1)), eps = 1/2. Sum 1, n = 6: 1 / sqrt(6 / 3). Squares 3.5, less 2:
# 1.5 / sqrt(6 * 4 / 45). Down: 0. Across: -1/2 + 0 + 1/2 - 1 = -1, four pairs: -1 / sqrt(4 / 9).
FACTORS, MEAN, VARIANCE = np.array([[1.5, 0.75, 1.0], [1.25, 1.5, 0.5]]), 1 / math.sqrt(2), 1.5 / math.sqrt(8 / 15)

test_by_hand = by_hand(
    *rows(first.jittered_logits, second.jittered_logits,
        *(
            (f"nothing is broadcast: {shapes}", of_ones(*shapes), REFUSED)
            for shapes in [
                ((2, 3), (2, 4), (5, 3)), ((2, 3), (1, 3), (5, 3)), ((2, 3), (2, 3), (5, 4)), ((2, 3), (2, 1), (5, 3)),
                ((2, 3), (2, 3), (3, 5)), ((2, 3), (2, 3), (5, 1)),
            ]
        ),
    ),
    *rows(first.seen_factors, second.seen_factors,
        ("column 3 of 3", (*of_ones((2, 2), (2, 3)), [0, 3]), REFUSED),
        ("column -1", (*of_ones((2, 2), (2, 3)), [0, -1]), REFUSED),
        ("a column read twice", (*of_ones((2, 2), (2, 3)), [1, 1]), REFUSED),
        ("fewer columns than experts", (*of_ones((2, 2), (2, 3)), [1]), REFUSED),
        ("logits of fewer tokens", (*of_ones((1, 2), (2, 3)), [1, 2]), REFUSED),
        *(
            (f"a token of {bad}", (np.ones((2, 1)), np.array([[1.0, bad], [1.0, 1.0]]), [1]), REFUSED)
            for bad in (0.0, INF, NAN)
        ),
    ),
    *rows(
        beside(lambda factors, eps, unit: first.legal_factors(floats(np.array(factors)), eps, unit=unit)),
        beside(lambda factors, eps, unit: second.legal_factors(np.array([factors]), eps, unit=unit)[0]),
        *(
            (f"{factor!r} for eps {eps}, roundoff {unit}", (factor, eps, unit), [True, legal])
            for factor, eps, unit, legal in [
                (HIGH, 0.25, UNIT, True), (NEXT(HIGH, 2.0), 0.25, UNIT, False), (LOW, 0.25, UNIT, True),
                (NEXT(LOW, 0.0), 0.25, UNIT, False), (1.25, 0.25, 0.0, True), (NEXT(1.25, 2.0), 0.25, 0.0, False),
                (0.75, 0.25, 0.0, True), (NEXT(0.75, 0.0), 0.25, 0.0, False), (1.0, 0.0, UNIT, True),
                (NEXT(1.0, 2.0), 0.0, UNIT, False), (NEXT(1.0, 0.0), 0.0, UNIT, False), (0.0, 1.0, 0.0, True),
                (2.0, 1.0, 0.0, True), (-UNIT, 1.0, 0.0, False), (-UNIT * 8, 1.0, UNIT, True),
                (-1.0, 0.25, UNIT, False), (NAN, 1.0, UNIT, False), (INF, 1.0, UNIT, False), (-INF, 1.0, UNIT, False),
            ]
        ),
        *(
            (f"no factor for eps {eps}, roundoff {unit}", (1.0, eps, unit), REFUSED)
            for eps, unit in [(-0.1, 0.0), (1.1, 0.0), (NAN, 0.0), (0.1, -UNIT), (0.1, NAN)]
        ),
    ),
    *rows(first.deviations, second.deviations,
        ("deviations", (FACTORS, 0.5), [MEAN, VARIANCE, 0.0, -1.5]),
        ("deviations, turned", (FACTORS.T.copy(), 0.5), [MEAN, VARIANCE, -1.5, 0.0]),
        *((f"eps {eps}", (np.ones((2, 3)), eps), REFUSED) for eps in (0.0, -0.1, NAN)),
        *((f"factors of shape {shape}", (np.ones(shape), 0.1), REFUSED) for shape in [(0, 3), (2, 0)]),
        *((f"a factor {bad}", (np.array([[1.0, bad]]), 0.1), REFUSED) for bad in (NAN, -INF)),
    ),
)  # fmt: skip
