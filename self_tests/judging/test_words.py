"""The words themselves: ratios, likenesses, and how findings are counted."""

from __future__ import annotations

import pytest
import torch

from moe_conformance.judging.compare.tensors import wrong
from moe_conformance.judging.explain.row_identity import likeness
from moe_conformance.judging.findings import Finding, common_ratio, fail, ratio_findings, ratio_words, tell
from moe_conformance.judging.verdict import WrongOutput


class TestExact:
    def test_zeros_of_either_sign_are_equal_and_nan_is_not(self) -> None:
        """Signs of zero do not matter; NaN is never right, not even for NaN."""
        actual = torch.tensor([0.0, torch.nan, 1.0, torch.inf])
        expected = torch.tensor([-0.0, torch.nan, 1.0, 1.0])
        assert [False, True, False, True] == wrong(actual, expected).tolist()

    def test_shapes_do_not_broadcast(self) -> None:
        """One row is not three equal rows."""
        with pytest.raises(ValueError, match=r"\(1, 4\) with \(3, 4\)"):
            wrong(torch.zeros(1, 4), torch.zeros(3, 4))


class TestRatio:
    def test_one_factor_is_found_exactly(self) -> None:
        """The factor of all elements is returned, whatever the zeros among them."""
        expected = torch.tensor([0.0, 0.125, -3.0])
        assert -0.75 == common_ratio(-0.75 * expected, expected)
        assert 0.0 == common_ratio(0 * expected, expected)

    @pytest.mark.parametrize("actual", [[1.0, 2.0, 3.1], [1.0, 2.0, torch.nan], [torch.inf, 2.0, 3.0], [0.0, 0.0, 1.0]])
    def test_anything_else_has_no_factor(self, actual: list[float]) -> None:
        """One element out of line, or not finite, and there is none."""
        assert common_ratio(torch.tensor(actual), torch.tensor([1.0, 2.0, 3.0])) is None

    def test_nothing_to_divide_by_has_no_factor(self) -> None:
        """Zeros, no elements and other shapes give no factor."""
        assert common_ratio(torch.ones(3), torch.zeros(3)) is None
        assert common_ratio(torch.ones(0), torch.ones(0)) is None
        assert common_ratio(torch.ones(2), torch.ones(3)) is None

    def test_rounding_is_tolerated_where_asked_for(self) -> None:
        """With a tolerance a factor is found through rounding, and only through it."""
        expected = torch.linspace(-1, 1, 50)
        actual = (2 * expected).bfloat16()
        assert common_ratio(actual, expected) is None
        assert pytest.approx(2.0, rel=1e-2) == common_ratio(actual, expected, tolerance=0.01)
        assert common_ratio(expected.abs(), expected, tolerance=0.01) is None

    def test_a_factor_is_named_by_every_size_that_it_equals(self) -> None:
        """Sizes that coincide are all named."""
        assert "4.000 x the expected value: ep or dp" == ratio_words(4.0, {"ep": 4.0, "dp": 4.0, "tp": 2.0})

    def test_a_factor_near_1_is_told_from_it(self) -> None:
        """In as many decimals as that takes; any other factor has three."""
        factors = (0.999998, 1.00002, 0.9994, 1 - 2**-24, 1.5)
        expected = ["0.999998", "1.00002", "0.999", "0.9999999", "1.500"]
        assert expected == [ratio_words(factor, {}).partition(" ")[0] for factor in factors]

    def test_ranks_are_looked_at_one_by_one_where_they_differ(self) -> None:
        """A factor of one rank is found though the others are right or otherwise wrong."""
        one = torch.tensor([1.0, 2.0])
        findings, ratio = ratio_findings("y", {0: (one, one), 1: (3 * one, one), 2: (one.flip(0), one)}, {"ep": 3.0})
        assert ratio is None
        assert ["every element of y on rank 1 is 3.000 x the expected value: ep"] == [
            found.sentence for found in findings
        ]


class TestTelling:
    def test_first_and_worst_are_told_and_the_rest_counted(self) -> None:
        """Of one kind, the first and the largest have a sentence."""
        findings = [Finding("off", f"off by {size}", (0,), size) for size in (1, 5, 3, 2)]
        assert "off by 1; largest error: off by 5; 2 more of the same kind" == tell(findings)

    def test_all_ranks_are_blamed_once_and_in_order(self) -> None:
        """Blame is the union over findings."""
        findings = [Finding("a", "a", (3, 1)), Finding("b", "b", (1,))]
        with pytest.raises(WrongOutput, match=r"combine: a\. Also: b, it seems") as error:
            fail(WrongOutput, "combine", findings, note=", it seems")
        assert (1, 3) == error.value.ranks


class TestLikeness:
    KNOWN = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).double()
    NAMES = tuple("abcdef")

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            (KNOWN[2], "c"),
            (-2 * KNOWN[2], "-2 x c"),
            (KNOWN[1] + KNOWN[4], "the sum of b and e"),
            (KNOWN[4] - KNOWN[1], "the difference of e and b"),
            (0.5 * KNOWN[1] - 3 * KNOWN[4], "0.5 x b + -3 x e"),
            (KNOWN[3].roll(-5), "d, shifted by 5 columns left"),
            (torch.cat([KNOWN[0][:10], KNOWN[5][10:]]), "a in columns 0..9 and f in columns 10..23"),
            (torch.cat([KNOWN[0][:20], torch.ones(4)]), "a except in columns 20..23"),
            (torch.zeros(24), "zero"),
            (torch.full((24,), torch.inf), "not finite in columns 0..23 (uninitialised?)"),
            (torch.arange(24.0), "not the row of a token, nor a multiple or a sum of two"),
        ],
    )
    def test_rows_are_recognised(self, row: torch.Tensor, words: str) -> None:
        """Multiples, mixes of two, shifts, splices and damage have their own words."""
        assert words == likeness(row, self.KNOWN, self.NAMES)
