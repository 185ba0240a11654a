"""Parameters of new routers, judged twice."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.routing import initial as first
from self_tests.chapters.routing.second import initial as second

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
numbers = st.sampled_from([0.0, -0.0, 1.0, 2.0, float("nan"), float("inf")])
weights = st.integers(0, 3).flatmap(
    lambda E: st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=E, max_size=E)
)


class TestUsable:
    @pairs_agree
    @given(weights, st.booleans())
    def test_both_find_the_same_wrong(self, rows: list[list[float]], by_expert: bool) -> None:
        """NaN, infinity and equal rows are found by both, whatever the number of experts."""
        value = np.array(rows, dtype=np.float32).reshape(-1, 2)
        expected = second.usable(value, by_expert=by_expert)
        assert expected == first.usable(torch.from_numpy(value), by_expert=by_expert)


class TestDiffering:
    @pairs_agree
    @given(st.dictionaries(st.integers(0, 7), weights, max_size=4))
    def test_both_list_the_same_ranks(self, held: dict[int, list[list[float]]]) -> None:
        """Other numbers, signs of zero and shapes are found by both."""
        arrays = {rank: np.array(rows, dtype=np.float32).reshape(-1, 2) for rank, rows in held.items()}
        found = first.differing({rank: torch.from_numpy(each) for rank, each in arrays.items()})
        assert second.differing(arrays) == found

    def test_other_dtypes_differ(self) -> None:
        """The same number in another dtype is another parameter."""
        assert [1] == first.differing({0: torch.ones(1), 1: torch.ones(1, dtype=torch.bfloat16)})
