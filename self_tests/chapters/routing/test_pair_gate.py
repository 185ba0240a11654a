"""Logits of a gate with a bias, worked out twice, with all gradients."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.routing import gate as first
from self_tests.chapters.routing.second import gate as second
from self_tests.oracles.agreement import assert_close, floats

pairs_agree = settings(max_examples=40, deadline=None, derandomize=True)
Floats = NDArray[np.float64]


def make_case(T: int, D: int, E: int, seed: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Tokens, weight, bias and upstream gradient."""
    random = np.random.default_rng(seed)
    return random.normal(size=(T, D)), random.normal(size=(E, D)), random.normal(size=E), random.normal(size=(T, E))


cases = st.builds(make_case, st.integers(0, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))


class TestLogits:
    @pairs_agree
    @given(cases)
    def test_logits_and_gradients_agree(self, case: tuple[Floats, ...]) -> None:
        """Both add the bias to every token's logits, and give it the sum of their gradients."""
        x_TD, weight_ED, bias_E, upstream_TE = case
        leaves = [floats(array, leaf=True) for array in case[:3]]
        logits_TE = first.logits(*leaves)
        assert_close(second.logits(x_TD, weight_ED, bias_E), logits_TE)
        found = torch.autograd.grad(logits_TE, leaves, floats(upstream_TE))
        for actual, expected in zip(found, second.gradients(x_TD, weight_ED, upstream_TE), strict=True):
            assert_close(expected, actual)

    @pairs_agree
    @given(cases)
    def test_no_bias_is_a_bias_of_zeros(self, case: tuple[Floats, ...]) -> None:
        """Without a bias the logits are the product alone."""
        x_TD, weight_ED, bias_E, _ = case
        plain_TE = first.logits(floats(x_TD), floats(weight_ED))
        assert_close(second.logits(x_TD, weight_ED, np.zeros_like(bias_E)), plain_TE)
