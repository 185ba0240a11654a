"""Large numbers and gradients at padding rows: where they are put, and where nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_conformance.contract import Delivery
from moe_conformance.scenarios.padding import PaddingGradients, large_beside_pairs
from moe_conformance.workloads.records import tags


def doubled(delivery: Delivery) -> Tensor:
    """Answer every row with twice itself."""
    return 2 * delivery.rows_RD


class TestPaddingGradients:
    def test_gradients_at_padding_rows_alone_are_large(self) -> None:
        """The row beyond the counts comes back with the number of padding, and the real one with its own gradient."""
        rows_RD = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
        experts = PaddingGradients(doubled)
        experts(Delivery.grouped(rows_RD, torch.tensor([1]))).sum().backward()
        assert rows_RD.grad is not None
        assert [[2.0, 2.0], [tags.PADDING_ANSWER] * 2] == rows_RD.grad.tolist()
        assert experts.rows == 1

    def test_no_rows_are_answered_by_no_rows(self) -> None:
        """A rank that receives nothing returns nothing, of the same width, and goes backward."""
        rows_RD = torch.empty(0, 3, requires_grad=True)
        experts = PaddingGradients(doubled)
        answer_RD = experts(Delivery.grouped(rows_RD, torch.zeros(2, dtype=torch.int64)))
        answer_RD.sum().backward()
        assert (0, 3) == answer_RD.shape
        assert experts.rows == 0


class TestPaddingRows:
    def test_rows_of_no_pair_are_large_both_ways(self) -> None:
        """Behind the pairs of each expert, and behind the last segment, rows and gradients are large; pairs are not."""
        rows_RD = torch.tensor([[1.0], [2.0], [0.0], [3.0], [0.0], [5.0]], requires_grad=True)
        large_RD = large_beside_pairs(rows_RD, torch.tensor([3, 0, 2]), (2, 0, 1))
        large, (own_RD,) = tags.PADDING_ANSWER, torch.autograd.grad(large_RD, rows_RD, torch.full_like(rows_RD, 7.0))
        assert [1.0, 2.0, large, 3.0, large, large] == large_RD.flatten().tolist()
        assert [7.0, 7.0, large, 7.0, large, large] == own_RD.flatten().tolist()

    @pytest.mark.parametrize("counts_E", [None, torch.tensor([3]), torch.tensor([1, 2])])
    def test_rows_that_nothing_counts_are_left_alone(self, counts_E: Tensor | None) -> None:
        """Without counts, with those of other experts, or with fewer than the pairs, they come back as they are."""
        rows_RD = torch.ones(3, 1)
        assert large_beside_pairs(rows_RD, counts_E, (2, 0)) is rows_RD
