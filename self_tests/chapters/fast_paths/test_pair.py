"""Equal splits, worked out twice: the first with slices and autograd, the longhand place by place."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
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
    @given(exchanges())
    def test_the_way_back_has_the_splits_turned_round(self, case: Exchange) -> None:
        """What dispatch sent comes back to its place when combine receives by what was sent."""
        splits_WW = torch.from_numpy(case.splits_WW)
        away = first.equal_exchange(tensors(case.rows_by_rank), splits_WW, case.split)
        back = first.equal_exchange(away, splits_WW.T.contiguous(), case.split)
        assert [rows.tolist() for rows in case.rows_by_rank] == [rows.tolist() for rows in back]

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

    def test_autograd_of_an_equal_exchange_is_its_derivative(self) -> None:
        """Gradcheck over both ranks' rows, with padding, a compaction, and a piece without rows."""
        splits_WW, random = torch.tensor([[2, 0], [1, 3]]), np.random.default_rng(5)
        leaves = [floats(random.normal(size=(rows, 2)), leaf=True) for rows in (2, 4)]
        assert torch.autograd.gradcheck(lambda *rows: first.equal_exchange(rows, splits_WW, 4), leaves)

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


class TestByHand:
    def test_rows_first_and_zeros_behind(self) -> None:
        """Pieces of 2, 0 and 1 rows in splits of 2: nothing behind the first, two and one zeros behind the others."""
        rows = torch.tensor([[1.0], [2.0], [3.0]])
        padded = first.pad(rows, [2, 0, 1], 2)
        assert [1.0, 2.0, 0.0, 0.0, 3.0, 0.0] == padded.flatten().tolist()
        assert [1.0, 2.0, 3.0] == first.compact(padded, [2, 0, 1], 2).flatten().tolist()
        assert (
            (0, 1) == tuple(first.pad(rows[:0], [0, 0], 0).shape) == tuple(first.compact(padded[:0], [0, 0], 0).shape)
        )

    def test_two_ranks_exchange_by_source(self) -> None:
        """Rank 0 sends 1 row to itself and 2 to rank 1, rank 1 sends 0 and 3: splits of 3 carry 12 places."""
        rows = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [5.0], [6.0]])]
        splits = torch.tensor([[1, 2], [0, 3]])
        expected = [[1.0], [2.0, 3.0, 4.0, 5.0, 6.0]]
        assert expected == [got.flatten().tolist() for got in first.equal_exchange(rows, splits, 3)]
        assert 3 == first.smallest_split(splits)
        ranks = [[3, 3], [4, 4], [2, 2], [2, 3], [3, 2], [3, 4]]
        assert [True, True, False, False, False, False] == [first.lawful_splits(own, splits) for own in ranks]

    def test_nothing_to_send_needs_no_places(self) -> None:
        """A split of 0 for all is legal where there are no rows."""
        splits = torch.zeros(2, 2, dtype=torch.int64)
        assert (0, True) == (first.smallest_split(splits), first.lawful_splits([0, 0], splits))
        received = first.equal_exchange([torch.zeros(0, 3)] * 2, splits, 0)
        assert [(0, 3), (0, 3)] == [tuple(rows.shape) for rows in received]


class TestLaws:
    @pairs_agree
    @given(exchanges(), st.randoms(use_true_random=False))
    def test_relabelling_ranks_reorders_sources(self, case: Exchange, random: Random) -> None:
        """New numbers for the ranks: each receives the same multiset of rows, whoever sent them."""
        order = list(range(len(case.splits_WW)))
        random.shuffle(order)
        moved_WW = case.splits_WW[np.ix_(order, order)]
        rows = []
        for s in order:  # the pieces of a source lie by destination, and so in a new order too
            starts = np.concatenate([[0], np.cumsum(case.splits_WW[s])])
            rows.append(np.concatenate([case.rows_by_rank[s][starts[d] : starts[d + 1]] for d in order]))
        before = first.equal_exchange(tensors(case.rows_by_rank), torch.from_numpy(case.splits_WW), case.split)
        after = first.equal_exchange(tensors(rows), torch.from_numpy(moved_WW), case.split)
        assert [sorted(before[d].tolist()) for d in order] == [sorted(got.tolist()) for got in after]

    @pairs_agree
    @given(paddings())
    def test_compaction_undoes_padding(self, case: Padding) -> None:
        """Bit for bit, and the gradient through both is the upstream gradient."""
        rows_RD = floats(case.rows_RD, leaf=True)
        again_RD = first.compact(first.pad(rows_RD, case.pieces, case.split), case.pieces, case.split)
        assert case.rows_RD.tolist() == again_RD.tolist()
        upstream = floats(case.rows_RD[::-1].copy())
        assert upstream.tolist() == torch.autograd.grad(again_RD, rows_RD, upstream)[0].tolist()
