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
from self_tests.oracles.agreement import assert_close, check_refused, floats

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

    @pytest.mark.parametrize(
        "shapes",
        [((2, 3), (2, 4), (5, 3)), ((2, 3), (1, 3), (5, 3)), ((2, 3), (2, 3), (5, 4)), ((2, 3), (2, 1), (5, 3)),
         ((2, 3), (2, 3), (3, 5)), ((2, 3), (2, 3), (5, 1))],
    )  # fmt: skip
    def test_refused(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """Nothing is broadcast."""
        check_refused(
            lambda: first.jittered_logits(*(torch.zeros(shape) for shape in shapes)),
            lambda: second.jittered_logits(*(np.zeros(shape) for shape in shapes)),
        )


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

    @pytest.mark.parametrize(
        ("logits", "x", "columns"),
        [
            ((2, 2), np.ones((2, 3)), [0, 3]),
            ((2, 2), np.ones((2, 3)), [0, -1]),
            ((2, 2), np.ones((2, 3)), [1, 1]),
            ((2, 2), np.ones((2, 3)), [1]),
            ((1, 2), np.ones((2, 3)), [1, 2]),
            ((2, 1), np.array([[1.0, 0.0], [1.0, 1.0]]), [1]),
            ((2, 1), np.array([[1.0, 1.0], [1.0, math.inf]]), [1]),
            ((2, 1), np.array([[1.0, 1.0], [1.0, math.nan]]), [1]),
        ],
    )
    def test_refused(self, logits: tuple[int, int], x: Floats, columns: list[int]) -> None:
        """Columns that are not there or read twice, and tokens that show no factor."""
        check_refused(
            lambda: first.seen_factors(torch.ones(logits), torch.from_numpy(x), columns),
            lambda: second.seen_factors(np.ones(logits), x, columns),
        )


UNIT = 2.0**-10
HIGH = 1.25 + 4 * UNIT * 1.25  # all of it exact
LOW = 0.75 - 4 * UNIT * 1.25


class TestLegalFactors:
    @pytest.mark.parametrize(
        ("factor", "eps", "unit", "expected"),
        [
            (HIGH, 0.25, UNIT, True),
            (math.nextafter(HIGH, 2.0), 0.25, UNIT, False),
            (LOW, 0.25, UNIT, True),
            (math.nextafter(LOW, 0.0), 0.25, UNIT, False),
            (1.25, 0.25, 0.0, True),
            (math.nextafter(1.25, 2.0), 0.25, 0.0, False),
            (0.75, 0.25, 0.0, True),
            (math.nextafter(0.75, 0.0), 0.25, 0.0, False),
            (1.0, 0.0, UNIT, True),
            (math.nextafter(1.0, 2.0), 0.0, UNIT, False),
            (math.nextafter(1.0, 0.0), 0.0, UNIT, False),
            (0.0, 1.0, 0.0, True),
            (2.0, 1.0, 0.0, True),
            (-UNIT, 1.0, 0.0, False),
            (-UNIT * 8, 1.0, UNIT, True),
            (-1.0, 0.25, UNIT, False),
            (math.nan, 1.0, UNIT, False),
            (math.inf, 1.0, UNIT, False),
            (-math.inf, 1.0, UNIT, False),
        ],
    )
    def test_by_hand(self, factor: float, eps: float, unit: float, expected: bool) -> None:
        """At the bounds exactly, and one step beside them; without jitter 1 alone."""
        factors = np.array([[1.0, factor]])
        assert [[True, expected]] == second.legal_factors(factors, eps, unit=unit).tolist()
        assert [[True, expected]] == first.legal_factors(floats(factors), eps, unit=unit).tolist()

    @pytest.mark.parametrize(("eps", "unit"), [(-0.1, 0.0), (1.1, 0.0), (math.nan, 0.0), (0.1, -UNIT), (0.1, math.nan)])
    def test_refused(self, eps: float, unit: float) -> None:
        """Jitter beyond 100 % and roundoff below 0."""
        check_refused(
            lambda: first.legal_factors(torch.ones(1), eps, unit=unit),
            lambda: second.legal_factors(np.ones(1), eps, unit=unit),
        )

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

    def test_by_hand(self) -> None:
        """With u = ((1, -1/2, 0), (1/2, 1, -1)), eps = 1/2."""
        # Sum 1, n = 6: 1 / sqrt(6 / 3). Squares 1 + 1/4 + 0 + 1/4 + 1 + 1 = 3.5, less 2: 1.5 / sqrt(6 * 4 / 45).
        # Down: 1/2 - 1/2 + 0 = 0. Across: -1/2 + 0 + 1/2 - 1 = -1, four pairs: -1 / sqrt(4 / 9) = -1.5.
        factors = np.array([[1.5, 0.75, 1.0], [1.25, 1.5, 0.5]])
        expected = [1 / math.sqrt(2), 1.5 / math.sqrt(8 / 15), 0.0, -1.5]
        for made in (second.deviations(factors, 0.5), first.deviations(floats(factors), 0.5)):
            assert expected == pytest.approx(list(made), rel=1e-14)
            assert -1.5 == pytest.approx(made.along_columns)
        turned = first.deviations(floats(factors.T), 0.5)
        assert [0.0, -1.5] == pytest.approx([turned.along_columns, turned.along_tokens])

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

    @pytest.mark.parametrize(
        ("factors", "eps"),
        [
            (np.ones((2, 3)), 0.0),
            (np.ones((2, 3)), -0.1),
            (np.ones((2, 3)), math.nan),
            (np.ones((0, 3)), 0.1),
            (np.ones((2, 0)), 0.1),
            (np.array([[1.0, math.nan]]), 0.1),
            (np.array([[1.0, -math.inf]]), 0.1),
        ],
    )
    def test_refused(self, factors: Floats, eps: float) -> None:
        """No jitter, no factor, or one that is no number."""
        check_refused(lambda: first.deviations(floats(factors), eps), lambda: second.deviations(factors, eps))
