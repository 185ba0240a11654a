"""Received rows from source-major to expert-major order, and back; W sources, N local experts, R rows.

`expert_major` has several shards of an expert: S ranks of etp, C of ep.
"""

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


def expert_major(counts_SCN: Tensor) -> Tensor:
    """Return the order that reorders blocks of rows from (etp, ep, expert) to (expert, ep, etp).

    Ranks of ep_etp count etp fastest, so within an expert the rows are then by source rank. Rows of a block
    stay in order.

    Implements: EXCH-21.
    """
    S, C, N = counts_SCN.shape
    place_NCS = torch.arange(S * C * N, device=counts_SCN.device).reshape(N, C, S)  # of a block, afterwards
    place_R = place_NCS.permute(2, 1, 0).reshape(-1).repeat_interleave(counts_SCN.reshape(-1))
    return place_R.argsort(stable=True)
