"""Experts that answer with the very tensor that they were handed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Delivery


class Identity:
    """Every expert is the identity. `rows` counts those that were answered where they lay."""

    def __init__(self) -> None:
        """Nothing has been handed over."""
        self.rows = 0

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the rows themselves; a sum over slots or with weights is computed apart."""
        rows_RD, ids_RJ = delivery.rows_RD, delivery.ids_RJ
        if ids_RJ.shape[1] == 1 and delivery.weights_RJ is None and delivery.unrouted == "padding":
            self.rows += int((ids_RJ >= 0).sum())
            return rows_RD.view(delivery.shape)
        weights_RJ = delivery.weights_RJ
        if weights_RJ is None:
            weights_RJ = torch.ones_like(ids_RJ, dtype=rows_RD.dtype)
        total_R1 = torch.where(ids_RJ >= 0, weights_RJ, 0).sum(1, keepdim=True)
        return (rows_RD * total_R1).to(rows_RD.dtype).reshape(delivery.shape)
