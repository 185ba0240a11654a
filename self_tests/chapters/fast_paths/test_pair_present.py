"""Both oracles of the expert of each row of a grouped call agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_conformance.reference.fast_paths import present
from self_tests.chapters.fast_paths.second import present as second


class TestSegments:
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=6))
    def test_rows_are_those_of_their_experts_in_order(self, held: list[tuple[int, int]]) -> None:
        """For any counts, those of no row and of no expert included."""
        counts, experts = [count for count, _ in held], [expert for _, expert in held]
        assert second.expert_of_each_row(counts, experts) == present.segments(counts, experts).tolist()

    @pytest.mark.parametrize(("counts", "experts"), [([1, -1], [0, 1]), ([1], [0, 1])])
    def test_what_counts_no_rows_is_refused(self, counts: list[int], experts: list[int]) -> None:
        """A negative count, and another number of counts than of experts."""
        with pytest.raises(ValueError, match="are no rows of the experts"):
            present.segments(counts, experts)
