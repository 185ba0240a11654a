"""The order of received rows by expert, with several shards of each: S ranks of etp, C of ep, N local experts."""

from __future__ import annotations

import torch
from torch import Tensor


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
