"""Both oracles of reordered sums agree, and sums in another order keep to what they allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_conformance.reference import overlap
from self_tests.chapters.overlap import second

_UNIT = 2.0**-24  # of float32


class TestReorderedSums:
    @given(st.integers(1, 7), st.integers(0, 2**32 - 1))
    def test_the_bounds_are_equal(self, addends: int, seed: int) -> None:
        """For any addends, few or many."""
        added = np.random.default_rng(seed).normal(size=(addends, 3, 2))
        expected = second.reordered_sum_bound(list(added), _UNIT)
        actual = overlap.reordered_sum_bound([torch.from_numpy(each) for each in added], _UNIT)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12)

    @given(st.integers(1, 9), st.integers(0, 2**32 - 1))
    def test_sums_in_another_order_keep_to_it(self, addends: int, seed: int) -> None:
        """In float32, forwards and in any order; of two addends, bit for bit."""
        random = np.random.default_rng(seed)
        added = (random.normal(size=(addends, 8)) * 10.0 ** random.integers(-3, 4, size=(addends, 8))).astype(
            np.float32
        )
        sums = []
        for order in (np.arange(addends), random.permutation(addends)):
            total = added[order[0]].copy()
            for number in order[1:]:
                total += added[number]
            sums.append(total.astype(np.float64))
        bound = overlap.reordered_sum_bound([torch.from_numpy(each) for each in added], _UNIT).numpy()
        assert (abs(sums[0] - sums[1]) <= bound).all()

    @pytest.mark.parametrize(
        ("addends", "unit", "words"), [(0, 0.5, "no microbatch"), (1, 0.0, "0.0"), (1, 1.0, "1.0")]
    )
    def test_what_has_no_bound_is_refused(self, addends: int, unit: float, words: str) -> None:
        """No addend, and what is no unit roundoff."""
        with pytest.raises(ValueError, match=words):
            overlap.reordered_sum_bound([torch.ones(1)] * addends, unit)
