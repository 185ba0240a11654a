"""The library's permutation and its sort of chunks, by themselves. T tokens, E experts, R rows, W sources, N local."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.contract import Permuted, Routing

_SHIMS = {"shims": "; ".join(library.SHIMS) or "none"}


class Permutation:
    """`permute` and `unpermute` of moe_utils, unfused; unpermute applies the weights."""

    resolved: Mapping[str, str] = {"permute": "unfused"} | _SHIMS

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        """Return the rows; the library leaves it to its callers to count them."""
        probs_TE, map_TE = routing.dense()
        rows = int(map_TE.sum())  # as the dispatchers tell it; newer versions require it, and return more
        rows_RD, weights_R, index_R, *_ = library.moe_utils.permute(x_TD, map_TE, probs=probs_TE, num_out_tokens=rows)
        return Permuted(rows_RD, None, weights_R, (index_R, x_TD.shape, probs_TE, map_TE))

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Return the sums."""
        index_R, shape, probs_TE, map_TE = handle
        y_TD: Tensor = library.moe_utils.unpermute(rows_RD, index_R, shape, probs=probs_TE, routing_map=map_TE)
        return y_TD


class Reordering:
    """`sort_chunks_by_idxs`, with the order that the all-to-all dispatcher gives it."""

    resolved: Mapping[str, str] = {"sort of chunks": "unfused"} | _SHIMS

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows expert by expert."""
        order = self._chunks(counts_WN).T.reshape(-1)
        rows: Tensor = library.moe_utils.sort_chunks_by_idxs(rows_RD, counts_WN.reshape(-1), order)[0]
        return rows

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows source by source."""
        order = self._chunks(counts_WN.T).T.reshape(-1)
        rows: Tensor = library.moe_utils.sort_chunks_by_idxs(rows_RD, counts_WN.T.reshape(-1), order)[0]
        return rows

    def _chunks(self, counts: Tensor) -> Tensor:
        """Return the numbers of the chunks in their order."""
        return torch.arange(counts.numel()).reshape(counts.shape)
