"""Large gradients at padding rows: where they are put, and where nothing is changed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Delivery
from moe_conformance.scenarios.padding import PaddingGradients
from moe_conformance.workloads import tags


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
        """A rank that is handed nothing answers with nothing, of the same width, and goes backward."""
        rows_RD = torch.empty(0, 3, requires_grad=True)
        experts = PaddingGradients(doubled)
        answer_RD = experts(Delivery.grouped(rows_RD, torch.zeros(2, dtype=torch.int64)))
        answer_RD.sum().backward()
        assert (0, 3) == answer_RD.shape
        assert experts.rows == 0
