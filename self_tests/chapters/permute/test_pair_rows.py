"""Rows by index and received rows, worked out twice: the first indexes and splits, the longhand carries each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.permute import reorder, row_index
from self_tests.chapters.permute import second
from self_tests.oracles.agreement import assert_close, floats, ints
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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


def counted(oracle: Callable[..., Any], array: Callable[[Any], Any]) -> Callable[..., Any]:
    """An oracle whose last argument is an array of counts."""
    return lambda *question: oracle(*question[:-1], array(question[-1]))


def first_scatter(index: Any, weights: list[float], tokens: int) -> Any:
    """Two rows of ones added to their tokens."""
    return row_index.scatter(torch.ones(2, 3), ints(index), torch.tensor(weights), tokens)


test_by_hand = by_hand(
    *rows(first_scatter, lambda index, weights, tokens: second.scattered(np.ones((2, 3)), index, weights, tokens),
        ("fewer indices than rows", ([0], [1.0, 1.0], 2), REFUSED),
        ("fewer weights than rows", ([0, 1], [1.0], 2), REFUSED),
        ("fewer than no token", ([0, 1], [1.0, 1.0], -1), REFUSED),
    ),
    *rows(counted(reorder.reorder_positions, ints), counted(second.positions, np.array),
        *((f"counts {counts}", (counts,), REFUSED) for counts in ([[1, -1]], [[3, -1]], [1, 1])),
    ),
    *(
        row for one, other in [(reorder.to_expert_major, second.by_expert), (reorder.to_source_major, second.by_source)]
        for row in rows(
            lambda values, counts, one=one: one(ints(values), ints(counts)), counted(other, np.array),
            (f"{other.__name__}: counts of another number of rows", ([7, 8], [[1, 2]]), REFUSED),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("index", [torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([0], dtype=torch.int32)])
def test_what_is_no_index_is_refused(index: torch.Tensor) -> None:
    """An index of floats, in two dimensions or of narrow integers; nor are counts floats."""
    with pytest.raises(ValueError, match="int64"):
        row_index.gather(torch.ones(1, 3), index)
    with pytest.raises(ValueError, match=r"int64|\(R,\)"):
        row_index.scatter(torch.ones(1, 3), index, torch.ones(1), 2)
    with pytest.raises(ValueError, match="int64"):
        reorder.reorder_positions(torch.ones(1, 1))
