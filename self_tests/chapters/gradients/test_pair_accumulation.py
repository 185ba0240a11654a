"""Bounds of accumulated gradients, worked out twice: with tensors, and element by element in fractions."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.gradients import accumulation as first
from self_tests.chapters.gradients import second

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
numbers = st.sampled_from([0.0, 1.0, -1.0, 2.0**-6, -(2.0**-6), 3.0, 96.0, -0.625])


class TestAccumulationPair:
    @pairs_agree
    @given(
        st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=20),
        st.integers(1, 4),
        st.integers(0, 64),
        st.booleans(),
    )
    def test_sums_and_bounds_agree(self, parts: list[list[float]], ranks: int, tokens: int, narrow: bool) -> None:
        """Both have the same sum and the same two bounds of every element, which such numbers have exactly."""
        found = first.accumulated(torch.tensor(parts).reshape(-1, 2), ranks=ranks, tokens=tokens, narrow=narrow)
        for n in range(2):
            expected = second.accumulated([Fraction(part[n]) for part in parts], ranks, tokens, narrow)
            assert expected == tuple(Fraction(each[n].item()) for each in found)
