"""Received rows from source-major to expert-major order, and back; W sources, N local experts, R rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_conformance.backends.native.offered import Offered


class Reordering(Offered):
    """Moves all rows at once, by an index that a stable sort of segments gives.

    Implements: EXCH-20.
    """

    surface = "reordering"

    @property
    def resolved(self) -> Mapping[str, str]:
        """By what rows are moved."""
        return {"reordering": "index"}

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows expert by expert."""
        return rows_RD[self._order(counts_WN)]

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows source by source."""
        return rows_RD[self._order(counts_WN).argsort()]

    def _order(self, counts_WN: Tensor) -> Tensor:
        """Return, for every row in expert-major order, where it stands in source-major order."""
        W, N = counts_WN.shape
        expert_R = torch.arange(N, device=counts_WN.device).repeat(W).repeat_interleave(counts_WN.reshape(-1))
        return expert_R.argsort(stable=True)
