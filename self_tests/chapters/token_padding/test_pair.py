"""Padded token counts, and refusals of a bound, worked out twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.token_padding import bounds
from moe_conformance.reference.token_padding import padding as first
from self_tests.chapters.token_padding import second
from self_tests.oracles.agreement import check_refused

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

GROUPS = [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[2, 0], [3, 1]], [[1], [3, 0, 2]], [[3, 2, 1, 0]]]


@st.composite
def token_counts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """An alignment, and counts of four ranks at and beside its multiples, none among them."""
    A = draw(st.sampled_from([1, 3, 8, 64]))
    near = st.sampled_from([0, 1, A - 1, A, A + 1, 2 * A, 2 * A + 1])
    return A, [draw(near) for _ in range(4)]


class TestCommonCounts:
    @pairs_agree
    @given(token_counts(), st.sampled_from(GROUPS), st.booleans())
    def test_padded_counts_agree(self, case: tuple[int, list[int]], groups: list[list[int]], kernel: bool) -> None:
        """Every rank pads to the largest count of its own group, rounded up."""
        A, tokens = case
        made = first.padded_counts(tokens, groups, alignment=A, needs_a_row=kernel)
        assert second.common_counts(tokens, groups, A, at_least_one=kernel) == list(made)

    @pairs_agree
    @given(st.integers(0, 200), st.sampled_from([1, 2, 7, 64]))
    def test_rounding_up_agrees(self, count: int, A: int) -> None:
        """A count, or a configured bound, becomes the smallest multiple that holds it."""
        expected = second.next_multiple(count, A)
        assert [expected, expected] == [
            first.aligned(count, alignment=A),
            bounds.bounded_count(count, alignment=A),
        ]

    @pairs_agree
    @given(token_counts(), st.sampled_from(GROUPS), st.integers(-2, 2), st.integers(0, 15))
    def test_legal_refusals_agree(
        self, case: tuple[int, list[int]], groups: list[list[int]], beside: int, answers: int
    ) -> None:
        """For bounds at and beside a rank's count, and any ranks refusing, both say which groups did right."""
        A, tokens = case
        bound = max(0, tokens[0] + beside)
        refused = [bool(answers >> rank & 1) for rank in range(4)]
        made = bounds.legal_refusals(refused, tokens, groups, bound, alignment=A)
        assert second.refusals_are_legal(refused, tokens, groups, bound, A) == list(made)

    @pytest.mark.parametrize(
        ("tokens", "groups", "A"),
        [([3, -1], [[0, 1]], 4), ([3, 1], [[0, 1]], 0), ([3, 1], [[0]], 4), ([3, 1], [[0, 1], [1]], 4),
         ([3], [[0, 1]], 4)],
    )  # fmt: skip
    def test_bad_counts_and_groups_are_refused(self, tokens: list[int], groups: list[list[int]], A: int) -> None:
        """Negative counts, no alignment, ranks in no group, in two, or unknown."""
        check_refused(
            lambda: first.padded_counts(tokens, groups, alignment=A), lambda: second.common_counts(tokens, groups, A)
        )
        refused = [False] * len(tokens)
        check_refused(
            lambda: bounds.legal_refusals(refused, tokens, groups, 5, alignment=A),
            lambda: second.refusals_are_legal(refused, tokens, groups, 5, A),
        )

    def test_answers_of_other_ranks_are_refused(self) -> None:
        """Each rank has one count and one answer."""
        check_refused(
            lambda: bounds.legal_refusals([True], [3, 1], [[0, 1]], 5),
            lambda: second.refusals_are_legal([True], [3, 1], [[0, 1]], 5, 64),
        )


class TestByHand:
    def test_the_laws_own_numbers(self) -> None:
        """Alignment 64 is the default: 0, 1, 64, 65 and 70 become 0, 64, 64, 128 and 128."""
        expected = [0, 64, 64, 128, 128]
        assert expected == [first.aligned(count) for count in (0, 1, 64, 65, 70)]
        assert expected == [second.next_multiple(count, 64) for count in (0, 1, 64, 65, 70)]

    def test_two_groups_pad_by_themselves(self) -> None:
        """Counts 70, 0, 3 and 64 in groups {0, 1} and {2, 3}: 128 rows on ranks 0 and 1, 64 on 2 and 3."""
        assert (128, 128, 64, 64) == first.padded_counts([70, 0, 3, 64], [[0, 1], [2, 3]])
        assert [128, 128, 64, 64] == second.common_counts([70, 0, 3, 64], [[0, 1], [2, 3]], 64)

    def test_a_bound_of_five_with_room_for_eight(self) -> None:
        """B = 5, A = 8: 5 tokens may not be refused, 6 to 8 may, by all or nobody, and 9 must be."""
        verdicts = {}
        for largest in (5, 6, 8, 9):
            for refused in ([False, False], [True, False], [True, True]):
                made = bounds.legal_refusals(refused, [2, largest], [[0, 1]], 5, alignment=8)
                assert second.refusals_are_legal(refused, [2, largest], [[0, 1]], 5, 8) == list(made)
                verdicts[largest, sum(refused)] = made[0]
        legal = {(5, 0), (6, 0), (6, 2), (8, 0), (8, 2), (9, 2)}
        assert legal == {case for case, verdict in verdicts.items() if verdict}
