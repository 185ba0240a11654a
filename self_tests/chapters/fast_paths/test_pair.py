"""Equal splits, worked out twice: the first with slices and autograd, the longhand place by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.fast_paths import equal_splits as first
from self_tests.chapters.fast_paths.second import equal_splits as second
from self_tests.oracles.agreement import assert_close, floats

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
    for piece, rows in enumerate(pieces):
        padded_PD[piece * split + rows : (piece + 1) * split] = draw(st.sampled_from([np.nan, np.inf, 7.0]))
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

    @pytest.mark.parametrize(
        ("pieces", "split", "shape"),
        [
            ([2, -1], 3, (1, 2)),
            ([2, 3], 2, (5, 2)),
            ([2, 3], -1, (5, 2)),
            ([2, 3], 3, (6, 2)),
            ([2, 3], 3, (4, 2)),
            ([2, 3], 3, (5,)),
            ([2, 3], 3, (5, 2, 1)),
            ([], 3, (1, 2)),
        ],
    )
    def test_pieces_that_do_not_fit_are_refused_by_both(
        self, pieces: list[int], split: int, shape: tuple[int, ...]
    ) -> None:
        """A negative piece, one larger than the split, other numbers of rows, rows that are not (R, D)."""
        with pytest.raises(ValueError, match=r"\w"):
            second.pad(np.zeros(shape), pieces, split)
        with pytest.raises(ValueError, match=r"\w"):
            first.pad(torch.zeros(shape), pieces, split)

    @pytest.mark.parametrize(
        ("pieces", "split", "shape"),
        [
            ([2, -1], 3, (6, 2)),
            ([2, 3], 2, (4, 2)),
            ([0, 0], -1, (0, 2)),
            ([2, 3], 3, (5, 2)),
            ([2, 3], 3, (7, 2)),
            ([2, 3], 3, (6,)),
            ([2, 3], 3, (6, 2, 1)),
            ([], 3, (3, 2)),
        ],
    )
    def test_places_that_do_not_fit_are_refused_by_both(
        self, pieces: list[int], split: int, shape: tuple[int, ...]
    ) -> None:
        """A negative piece, one larger than the split, other numbers of places, places that are not (P, D)."""
        with pytest.raises(ValueError, match=r"\w"):
            second.compact(np.zeros(shape), pieces, split)
        with pytest.raises(ValueError, match=r"\w"):
            first.compact(torch.zeros(shape), pieces, split)


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
        for rows, leaf in zip(expected, leaves, strict=True):
            assert rows.tolist() == ([] if leaf.grad is None else leaf.grad.tolist())

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

    @pytest.mark.parametrize(
        ("rows", "splits"),
        [
            ([(3, 2), (3, 2)], np.array([[1, 2], [0, 4]])),
            ([(3, 2), (4, 2), (0, 2)], np.array([[1, 2], [0, 4]])),
            ([(3, 2)], np.array([[1, 2], [0, 4]])),
            ([(3, 2), (4, 1)], np.array([[1, 2], [0, 4]])),
            ([(3, 2), (4, 2)], np.array([[4, -1], [0, 4]])),
            ([(3, 2), (4, 2)], np.array([[1, 2], [0, 4]], dtype=np.int32)),
            ([(3, 2), (4, 2)], np.array([[1, 2, 0], [0, 4, 0]])),
            ([(3, 2), (4, 2)], np.array([3, 4])),
            ([], np.zeros((0, 0), dtype=np.int64)),
        ],
    )
    def test_an_exchange_that_does_not_fit_is_refused_by_both(self, rows: Any, splits: Any) -> None:
        """Other rows than are sent, other ranks, another width, splits that are none."""
        arrays, given_rows = [np.zeros(shape) for shape in rows], [torch.zeros(shape) for shape in rows]
        for call in (
            lambda: second.uneven_exchange(arrays, splits),
            lambda: second.equal_exchange(arrays, splits, 4),
            lambda: first.uneven_exchange(given_rows, torch.from_numpy(splits)),
            lambda: first.equal_exchange(given_rows, torch.from_numpy(splits), 4),
        ):
            with pytest.raises(ValueError, match=r"\w"):
                call()

    @pytest.mark.parametrize("splits", [np.zeros((0, 0), np.int64), np.ones((2, 3), np.int64), np.full((1, 1), -1)])
    def test_splits_that_are_none_are_refused_by_both(self, splits: Ints) -> None:
        """No rank, not square, less than no rows; nor a word on the splits of other ranks."""
        for call in (
            lambda: second.smallest_split(splits),
            lambda: first.smallest_split(torch.from_numpy(splits)),
            lambda: second.lawful_splits([3] * 3, np.ones((2, 2), np.int64)),
            lambda: first.lawful_splits([3] * 3, torch.ones(2, 2, dtype=torch.int64)),
        ):
            with pytest.raises(ValueError, match=r"\w"):
                call()

    def test_a_split_too_small_is_refused_by_both(self) -> None:
        """The largest piece has four rows; three would cut it."""
        arrays, splits = [np.zeros((3, 2)), np.zeros((4, 2))], np.array([[1, 2], [0, 4]])
        with pytest.raises(ValueError, match="3"):
            second.equal_exchange(arrays, splits, 3)
        with pytest.raises(ValueError, match="3"):
            first.equal_exchange([torch.from_numpy(rows) for rows in arrays], torch.from_numpy(splits), 3)
