"""When the shortcut for equal counts holds, counters, and experts of rows, worked out twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.fast_paths import choices as first
from moe_conformance.reference.fast_paths import present
from self_tests.chapters.fast_paths.second import choices as second
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class TestCountsPair:
    @pairs_agree
    @given(st.one_of(st.none(), st.lists(st.integers(0, 2), max_size=4)))
    def test_equal_counts_agree(self, counts: list[int] | None) -> None:
        """Both take the shortcut for the same counts."""
        rows = 4 if counts is None else sum(counts)
        assert second.equal_counts(counts, rows) == first.equal_counts(counts, rows)

    @pairs_agree
    @given(st.lists(st.booleans()))
    def test_decisions_are_counted_alike(self, taken: list[bool]) -> None:
        """Both count each decision once."""
        assert second.decision_counts(taken) == first.decision_counts(taken)

    @pairs_agree
    @given(st.lists(st.sampled_from(["look_up", "look_up", "change", "reset"])))
    def test_look_ups_are_counted_alike(self, events: list[Any]) -> None:
        """Both count the same hits and misses."""
        assert second.look_up_counts(events) == first.look_up_counts(events)


class TestSegments:
    @pairs_agree
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


test_by_hand = by_hand(
    *rows(first.equal_counts, second.equal_counts,
        *(
            (f"counts {counts} of {n} rows", (counts, n), REFUSED)
            for counts, n in [([3, 3], 7), ([3, 3], 5), ([], 1), ([2, -2], 0), ([-1, -1], -2)]
        ),
    ),
    *rows(first.look_up_counts, second.look_up_counts,
        ("counters reset leave the cache warm", (["look_up", "change", "look_up", "reset", "look_up"],), (1, 0)),
        ("an unknown event", (["look_up", "drop"],), REFUSED),
    ),
)  # fmt: skip
