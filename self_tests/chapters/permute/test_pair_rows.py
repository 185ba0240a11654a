"""Rows by index and received rows, worked out twice: the first indexes and splits, the longhand carries each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.permute import reorder, row_index
from self_tests.chapters.permute import second
from self_tests.oracles.agreement import assert_close, check_refused, floats, ints

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def index_cases(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """T, an index with sentinels of all kinds anywhere, and a seed."""
    T = draw(st.integers(0, 4))
    return (
        T,
        draw(st.lists(st.sampled_from([-7, -1, 0, 1, 2, 3, T - 1, T, T + 1, 10**9]), max_size=6)),
        draw(st.integers(0, 10**6)),
    )


class TestRowIndex:
    @pairs_agree
    @given(index_cases())
    def test_gathering_agrees(self, case: tuple[int, list[int], int]) -> None:
        """Both fetch the same rows, zeros at sentinels, and send each row's gradient back to its token alone."""
        T, index, seed = case
        random = np.random.default_rng(seed)
        x_TD, g_RD = random.normal(size=(T, 2)), random.normal(size=(len(index), 2))
        leaf = floats(x_TD, leaf=True)
        rows_RD = row_index.gather(leaf, ints(index))
        assert torch.float64 == rows_RD.dtype
        assert second.gathered(x_TD, index).tolist() == rows_RD.tolist()
        (grad,) = torch.autograd.grad(rows_RD, leaf, floats(g_RD))
        assert_close(second.gathered_backward(T, index, g_RD), grad, addend=1.0)

    @pairs_agree
    @given(index_cases(), st.sampled_from([np.nan, np.inf, 3.0]))
    def test_scattering_agrees(self, case: tuple[int, list[int], int], behind: float) -> None:
        """Both add the same rows; what stands behind a sentinel, NaN too, reaches no token and no gradient."""
        T, index, seed = case
        random = np.random.default_rng(seed)
        out_RD, weights_R, g_TD = (
            random.normal(size=(len(index), 2)),
            random.normal(size=len(index)),
            random.normal(size=(T, 2)),
        )
        for r, i in enumerate(index):
            if not 0 <= i < T:
                out_RD[r], weights_R[r] = behind, behind
        out, weights = floats(out_RD, leaf=True), floats(weights_R, leaf=True)
        y_TD = row_index.scatter(out, ints(index), weights, T)
        assert_close(second.scattered(out_RD, index, weights_R.tolist(), T), y_TD, addend=1.0)
        dout, dweights = torch.autograd.grad(y_TD, (out, weights), floats(g_TD))
        expected_out, expected_weights = second.scattered_backward(out_RD, index, weights_R.tolist(), g_TD)
        assert_close(expected_out, dout)
        assert_close(expected_weights, dweights, addend=1.0)

    def test_bad_indices_are_refused(self) -> None:
        """An index of floats or in two dimensions; numbers of rows that differ; fewer than no token."""
        x, w = torch.ones(2, 3), torch.ones(2)
        for index in (torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]]), torch.tensor([0, 1], dtype=torch.int32)):
            with pytest.raises(ValueError, match="int64"):
                row_index.gather(x, index)
            with pytest.raises(ValueError, match=r"int64|\(R,\)"):
                row_index.scatter(x, index, w, 2)
        for index, weights, tokens in [([0], [1.0, 1.0], 2), ([0, 1], [1.0], 2), ([0, 1], [1.0, 1.0], -1)]:
            check_refused(
                lambda index=index, weights=weights, tokens=tokens: row_index.scatter(
                    x, ints(index), torch.tensor(weights), tokens
                ),
                lambda index=index, weights=weights, tokens=tokens: second.scattered(
                    np.ones((2, 3)), index, weights, tokens
                ),
            )


@st.composite
def counts_of_segments(draw: st.DrawFn) -> Ints:
    """Rows from each source for each local expert: uneven, empty, or all equal, as a shortcut takes them."""
    W, N = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    if draw(st.booleans()):
        return np.full((W, N), draw(st.integers(0, 3)), dtype=np.int64)
    return np.array([[draw(st.integers(0, 3)) for _ in range(N)] for _ in range(W)], dtype=np.int64).reshape(W, N)


class TestReordering:
    @pairs_agree
    @given(counts_of_segments())
    def test_both_ways_agree(self, counts: Ints) -> None:
        """Every row, which says whose it is, goes to the same place and back."""
        rows = second.keys(counts)
        R = len(rows)
        tensor = ints(rows).reshape(R, 3)
        made = reorder.to_expert_major(tensor, torch.from_numpy(counts))
        there = [tuple(row) for row in made.tolist()]
        assert second.by_expert(rows, counts) == there
        assert second.positions(counts) == reorder.reorder_positions(torch.from_numpy(counts)).tolist()
        assert [there[q] for q in second.positions(counts)] == rows
        assert there == sorted(rows, key=lambda row: (row[1], row[0], row[2]))
        assert tensor.tolist() == reorder.to_source_major(made, torch.from_numpy(counts)).tolist()
        assert rows == second.by_source(there, counts)

    def test_bad_counts_are_refused(self) -> None:
        """Negative, of one dimension, of floats, or of another number of rows."""
        for counts in ([[1, -1]], [[3, -1]], [1, 1]):
            check_refused(
                lambda counts=counts: reorder.reorder_positions(ints(counts)),
                lambda counts=counts: second.positions(np.array(counts)),
            )
        with pytest.raises(ValueError, match="int64"):
            reorder.reorder_positions(torch.ones(1, 1))
        rows, counts = [7, 8], [[1, 2]]
        check_refused(
            lambda: reorder.to_expert_major(ints(rows), ints(counts)),
            lambda: second.by_expert(rows, np.array(counts)),
        )
        check_refused(
            lambda: reorder.to_source_major(ints(rows), ints(counts)),
            lambda: second.by_source(rows, np.array(counts)),
        )
