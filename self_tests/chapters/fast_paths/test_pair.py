"""Equal splits, worked out twice: the first with slices and autograd, the longhand place by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

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


class Exchange(NamedTuple):
    """Rows of every rank, how many go from whom to whom, the size of equal splits, and what comes back."""

    rows_by_rank: list[Floats]
    splits_WW: Ints
    split: int
    upstream: list[Floats]


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """One to four ranks with uneven pieces; some send nothing, some are sent nothing; splits exact or larger."""
    W, D = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    splits = [draw(st.lists(st.integers(0, 3), min_size=W, max_size=W)) for _ in range(W)]
    if draw(st.booleans()):
        splits[draw(st.integers(0, W - 1))] = [0] * W
    splits_WW = np.array(splits, dtype=np.int64)
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows = [random.normal(size=(sum(pieces), D)) for pieces in splits]
    upstream = [random.normal(size=(int(splits_WW[:, d].sum()), D)) for d in range(W)]
    return Exchange(rows, splits_WW, int(splits_WW.max()) + draw(st.sampled_from([0, 0, 2])), upstream)


def tensors(arrays: Sequence[Floats], *, leaf: bool = False) -> list[Tensor]:
    """One tensor for every rank's rows."""
    return [floats(array, leaf=leaf) for array in arrays]


class TestExchangePair:
    @pairs_agree
    @given(exchanges())
    def test_all_four_exchanges_agree(self, case: Exchange) -> None:
        """Even and uneven, first and second: every rank receives the same rows in the same order, bit for bit."""
        splits_WW = torch.from_numpy(case.splits_WW)
        expected = [rows.tolist() for rows in second.uneven_exchange(case.rows_by_rank, case.splits_WW)]
        even = second.equal_exchange(case.rows_by_rank, case.splits_WW, case.split)
        assert expected == [rows.tolist() for rows in even]
        for received in (
            first.uneven_exchange(tensors(case.rows_by_rank), splits_WW),
            first.equal_exchange(tensors(case.rows_by_rank), splits_WW, case.split),
        ):
            assert expected == [rows.tolist() for rows in received]
            assert [rows.shape for rows in even] == [tuple(rows.shape) for rows in received]

    @pairs_agree
    @given(exchanges(), st.booleans())
    def test_gradients_travel_back(self, case: Exchange, equal: bool) -> None:
        """Autograd returns every row's gradient to whom sent it, as the formula does; padding adds none."""
        splits_WW, leaves = torch.from_numpy(case.splits_WW), tensors(case.rows_by_rank, leaf=True)
        if equal:
            received = first.equal_exchange(leaves, splits_WW, case.split)
        else:
            received = first.uneven_exchange(leaves, splits_WW)
        torch.autograd.backward(list(received), tensors(case.upstream))
        expected = second.uneven_exchange_backward(case.upstream, case.splits_WW)
        for gradient, leaf in zip(expected, leaves, strict=True):
            assert gradient.tolist() == ([] if leaf.grad is None else leaf.grad.tolist())

    @pairs_agree
    @given(exchanges(), st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def test_lawful_splits_agree(self, case: Exchange, drawn: list[int]) -> None:
        """Both know the smallest split and whether the ranks' own are lawful."""
        W, splits_WW = len(case.splits_WW), torch.from_numpy(case.splits_WW)
        smallest = second.smallest_split(case.splits_WW)
        assert smallest == first.smallest_split(splits_WW)
        own = [int(row.max()) for row in case.splits_WW]
        for ranks in (drawn[:W], [case.split] * W, [smallest - 1] * W, [smallest] * W, own, [smallest + 1, *own][:W]):
            assert second.lawful_splits(ranks, case.splits_WW) == first.lawful_splits(ranks, splits_WW)


def not_fitting(name: str, *table: tuple[list[int], int, tuple[int, ...]]) -> list[tuple[Any, ...]]:
    """Rows of a shape that are not those of these pieces, or pieces that are not those of this split."""
    return [
        (f"{name} {pieces} in {split}: {shape}", (np.zeros(shape), pieces, split), REFUSED)
        for pieces, split, shape in table
    ]


THREE_AND_FOUR, SPLITS = [(3, 2), (4, 2)], np.array([[1, 2], [0, 4]])
NO_EXCHANGE = [
    (f"rows {shapes} of splits {splits.tolist()}", ([np.zeros(shape) for shape in shapes], splits))
    for shapes, splits in [
        ([(3, 2), (3, 2)], SPLITS),
        ([(3, 2), (4, 2), (0, 2)], SPLITS),
        ([(3, 2)], SPLITS),
        ([(3, 2), (4, 1)], SPLITS),
        (THREE_AND_FOUR, np.array([[4, -1], [0, 4]])),
        (THREE_AND_FOUR, SPLITS.astype(np.int32)),
        (THREE_AND_FOUR, np.array([[1, 2, 0], [0, 4, 0]])),
        (THREE_AND_FOUR, np.array([3, 4])),
        ([], np.zeros((0, 0), dtype=np.int64)),
    ]
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
    *rows(first.uneven_exchange, second.uneven_exchange,
        *((f"uneven: {name}", question, REFUSED) for name, question in NO_EXCHANGE),
    ),
    *rows(first.equal_exchange, second.equal_exchange,
        *((f"equal: {name}", (*question, 4), REFUSED) for name, question in NO_EXCHANGE),
        ("three would cut a piece of four", ([np.zeros(shape) for shape in THREE_AND_FOUR], SPLITS, 3), REFUSED),
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
