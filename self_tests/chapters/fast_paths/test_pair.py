"""Equal splits, worked out twice: the first with slices and autograd, the longhand place by place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.fast_paths import equal_splits as first
from self_tests.chapters.fast_paths.second import equal_splits as second
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Padding(NamedTuple):
    """Rows in pieces, and how long each piece is made."""

    pieces: list[int]
    split: int
    rows_RD: Floats
    padded_PD: Floats


@st.composite
def paddings(draw: st.DrawFn) -> Padding:
    """Pieces without rows and pieces that fill the split; no piece at all, no column; padding that is not finite."""
    pieces = draw(st.lists(st.integers(0, 4), max_size=4))
    split, D = max(pieces, default=0) + draw(st.sampled_from([0, 0, 1, 3])), draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    padded_PD = random.normal(size=(len(pieces) * split, D))
    for piece, filled in enumerate(pieces):
        padded_PD[piece * split + filled : (piece + 1) * split] = draw(st.sampled_from([np.nan, np.inf, 7.0]))
    return Padding(pieces, split, random.normal(size=(sum(pieces), D)), padded_PD)


class TestPaddingPair:
    @pairs_agree
    @given(paddings())
    def test_padded_rows_agree(self, case: Padding) -> None:
        """Both put the same rows in the same places and zeros behind them, bit for bit, and derive alike."""
        rows_RD = floats(case.rows_RD, leaf=True)
        padded_PD = first.pad(rows_RD, case.pieces, case.split)
        assert_close(second.pad(case.rows_RD, case.pieces, case.split), padded_PD)
        assert second.pad(case.rows_RD, case.pieces, case.split).tolist() == padded_PD.tolist()
        (d_rows_RD,) = torch.autograd.grad(padded_PD, rows_RD, floats(case.padded_PD))
        expected = second.pad_backward(case.padded_PD, case.pieces, case.split)
        assert (expected.shape, expected.tolist()) == (tuple(d_rows_RD.shape), d_rows_RD.tolist())

    @pairs_agree
    @given(paddings())
    def test_compacted_rows_agree(self, case: Padding) -> None:
        """Both take the same rows, bit for bit, and padding that is not finite neither shows nor has a gradient."""
        padded_PD = floats(case.padded_PD, leaf=True)
        rows_RD = first.compact(padded_PD, case.pieces, case.split)
        expected = second.compact(case.padded_PD, case.pieces, case.split)
        assert (torch.float64, expected.shape) == (rows_RD.dtype, tuple(rows_RD.shape))
        assert expected.tolist() == rows_RD.tolist()
        (d_padded_PD,) = torch.autograd.grad(rows_RD, padded_PD, floats(case.rows_RD))
        assert_close(second.compact_backward(case.rows_RD, case.pieces, case.split), d_padded_PD)


@st.composite
def splits(draw: st.DrawFn) -> Ints:
    """One to four ranks with uneven pieces; some send nothing, some are sent nothing."""
    W = draw(st.integers(1, 4))
    drawn = [draw(st.lists(st.integers(0, 3), min_size=W, max_size=W)) for _ in range(W)]
    if draw(st.booleans()):
        drawn[draw(st.integers(0, W - 1))] = [0] * W
    return np.array(drawn, dtype=np.int64)


class TestSplitsPair:
    @pairs_agree
    @given(splits(), st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def test_lawful_splits_agree(self, splits_WW: Ints, drawn: list[int]) -> None:
        """Both know the smallest split and whether the ranks' own are lawful."""
        W, given_WW = len(splits_WW), torch.from_numpy(splits_WW)
        smallest = second.smallest_split(splits_WW)
        assert smallest == first.smallest_split(given_WW)
        own = [int(row.max()) for row in splits_WW]
        for ranks in (drawn[:W], [smallest - 1] * W, [smallest] * W, own, [smallest + 1, *own][:W]):
            assert second.lawful_splits(ranks, splits_WW) == first.lawful_splits(ranks, given_WW)


def not_fitting(name: str, *table: tuple[list[int], int, tuple[int, ...]]) -> list[tuple[Any, ...]]:
    """Rows of a shape that are not those of these pieces, or pieces that are not those of this split."""
    return [
        (f"{name} {pieces} in {split}: {shape}", (np.zeros(shape), pieces, split), REFUSED)
        for pieces, split, shape in table
    ]


test_by_hand = by_hand(
    *rows(first.pad, second.pad,
        *not_fitting(
            "pieces",
            ([2, -1], 3, (1, 2)), ([2, 3], 2, (5, 2)), ([2, 3], -1, (5, 2)), ([2, 3], 3, (6, 2)), ([2, 3], 3, (4, 2)),
            ([2, 3], 3, (5,)), ([2, 3], 3, (5, 2, 1)), ([], 3, (1, 2)),
        ),
    ),
    *rows(first.compact, second.compact,
        *not_fitting(
            "places",
            ([2, -1], 3, (6, 2)), ([2, 3], 2, (4, 2)), ([0, 0], -1, (0, 2)), ([2, 3], 3, (5, 2)), ([2, 3], 3, (7, 2)),
            ([2, 3], 3, (6,)), ([2, 3], 3, (6, 2, 1)), ([], 3, (3, 2)),
        ),
    ),
    *rows(first.smallest_split, second.smallest_split,
        ("no rank", (np.zeros((0, 0), np.int64),), REFUSED),
        ("splits that are not square", (np.ones((2, 3), np.int64),), REFUSED),
        ("less than no rows", (np.full((1, 1), -1),), REFUSED),
    ),
    *rows(first.lawful_splits, second.lawful_splits,
        ("splits of other ranks", ([3] * 3, np.ones((2, 2), np.int64)), REFUSED),
    ),
)  # fmt: skip  # fmt: skip
